"""Block-sparse products on a GPU: every choice verified, capture, and NaN beside absent blocks."""

from __future__ import annotations

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.backends.table import load
from gemmtune.choice import Status
from gemmtune.device import detect
from gemmtune.problem import Problem
from gemmtune.selector.offers import offers_for
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings
from gemmtune.sparse import create_blocked_tensor

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")]
PROBLEMS = {
    "bf16-tokens-16": Problem.bsr_mm(16, 512, 768, block=64, device_type="cuda", prepacked=True),
    "fp16-blocks-of-16": Problem.bsr_mm(
        100, 256, 512, block=16, dtype=torch.float16, density=0.1, device_type="cuda", prepacked=True
    ),
    "bf16-plain-skewed": Problem.bsr_addmm(
        48, 256, 512, block=(32, 64), imbalance="skewed", wide_index=True, density=0.3, device_type="cuda"
    ),
    "fp32": Problem.bsr_mm(33, 256, 256, block=32, dtype=torch.float32, device_type="cuda", prepacked=True),
    "int8": Problem.bsr_mm(64, 256, 256, block=64, dtype=torch.int8, device_type="cuda", prepacked=True),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_every_choice_is_right(backend: str, name: str) -> None:
    problem, device = PROBLEMS[name], detect("cuda")
    verifier = Verifier(problem, device.torch_device)
    choices = load(backend).enumerate(problem, device, Settings()).choices
    found = {choice.name: verifier.check(choice, choice.build()) for choice in choices}
    assert {v.status for v in found.values()} <= {Status.OK}, {n: v.reason for n, v in found.items() if v.status is not Status.OK}


def test_the_dense_products_of_other_backends_are_offered_for_prepacked_weights() -> None:
    names = [c.name for c in offers_for(PROBLEMS["bf16-tokens-16"], detect("cuda"), Settings()).choices]
    assert any(name.endswith("+dense") and not name.startswith("aten:") for name in names)


def test_a_captured_call_sees_values_that_changed(own_store) -> None:
    bsr = create_blocked_tensor(256, 256, block=32, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(256, 16, dtype=torch.bfloat16, device="cuda")
    with settings.patch(tune="never"):
        out = torch.empty(256, 16, dtype=torch.bfloat16, device="cuda")
        gemmtune.bsr_mm(bsr, x, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gemmtune.bsr_mm(bsr, x, out=out)
        bsr.values().mul_(2)
        graph.replay()
    want = bsr.to_dense().double() @ x.double()
    assert (out.double() - want).abs().max() <= 3e-2 * want.abs().max()


def test_indices_that_are_not_known_cannot_be_read_in_a_capture() -> None:
    bsr, x = create_blocked_tensor(64, 64, block=32, device="cuda"), torch.randn(64, 16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(gemmtune.InvalidProblemError, match="call it once before"), torch.cuda.graph(graph):
        gemmtune.bsr_mm(bsr, x)
