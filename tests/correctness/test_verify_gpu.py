"""Verifier on a GPU: torch's own operations pass, broken results are found, inputs in device memory are watched."""

from __future__ import annotations

import pytest
import torch
from broken_kernels import choice_of

from gemmtune.choice import Status
from gemmtune.device import detect
from gemmtune.extern.aten import BACKEND
from gemmtune.problem import Problem, precision_of
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
@pytest.mark.parametrize("size", [(1, 4096, 4096), (500, 501, 499), (128, 128, 65536)], ids=str)
def test_torch_passes(cuda: torch.device, size: tuple[int, int, int], layout: str, dtype: torch.dtype) -> None:
    problem = Problem.mm(*size, dtype=dtype, layout=layout, device_type="cuda", precision=precision_of(dtype, "cuda"))
    verifier = Verifier(problem, cuda)
    for choice in BACKEND.enumerate(problem, detect(cuda), Settings()).choices:
        result = verifier.check(choice, choice.build())
        assert result.status == Status.OK, result.reason


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", ["n", "m1", "mn"])
def test_torch_addmm_passes(cuda: torch.device, bias: str, dtype: torch.dtype) -> None:
    problem = Problem.addmm(
        300, 200, 1000, dtype=dtype, bias=bias, alpha=2, beta=0.5, device_type="cuda", precision=precision_of(dtype, "cuda")
    )  # type: ignore[arg-type]
    verifier = Verifier(problem, cuda)
    for choice in BACKEND.enumerate(problem, detect(cuda), Settings()).choices:
        result = verifier.check(choice, choice.build())
        assert result.status == Status.OK, result.reason


def test_broken_results_are_found(cuda: torch.device) -> None:
    problem = Problem.mm(300, 200, 1000, dtype=torch.bfloat16, device_type="cuda")

    def wrong(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
        torch.mm(a, b, out=out)
        out[123, 45] += 1

    def partial(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
        torch.mm(a[:-1], b, out=out[:-1])

    def modifying(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
        torch.mm(a, b, out=out)
        b[3, 4] += 1

    verifier = Verifier(problem, cuda)
    reasons = []
    for run in (wrong, partial, modifying, torch.mm):
        choice = choice_of(problem, run if run is not torch.mm else lambda out, a, b, *_: torch.mm(a, b, out=out))
        reasons.append(verifier.check(choice, choice.build()).reason)
    assert "out[123, 45]" in reasons[0]
    assert "out[299, " in reasons[1]
    assert "was not written" in reasons[1]
    assert reasons[2].startswith("the call changed its input: b of ")
    assert reasons[3] == ""


def test_the_host_waits_once(cuda: torch.device) -> None:
    """With waiting forbidden, everything up to the final reading of the findings must go through."""
    problem = Problem.mm(256, 256, 512, dtype=torch.bfloat16, device_type="cuda")
    verifier = Verifier(problem, cuda)
    choice = choice_of(problem, lambda out, a, b, *_: torch.mm(a, b, out=out))
    kernel = choice.build()
    verifier.check(choice, kernel)  # makes the probe for these claims
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz") as caught:
            verifier.check(choice, kernel)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert caught.traceback[-1].name == "_verdict"
