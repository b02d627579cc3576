"""mm_plus_mm on a GPU: every choice is right by its own claims, the operation with streams, graphs, gradients and out=."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.sums import SumChoice, predicate_for
from gemmtune.choice import Choice, Status
from gemmtune.device import detect
from gemmtune.dispatch.ready import forget_plans
from gemmtune.problem import Layout, Precision, Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.offers import offers_for
from gemmtune.selector.precompile import precompile
from gemmtune.selector.verify import Verifier
from gemmtune.settings import current

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def _problem(
    m: int, n: int, k: int, k2: int, dtype: torch.dtype = torch.bfloat16, layout: str = "nt", mode: str = "ieee"
) -> Problem:
    precision = Precision(input_mode=mode)  # type: ignore[arg-type]
    return Problem.mm_plus_mm(m, n, k, k2, dtype=dtype, layout=layout, device_type="cuda", precision=precision)


_EVEN = _problem(256, 384, 512, 256)
_TURNED = _problem(256, 384, 512, 256, layout="tn")
_ROW = torch.empty(384, dtype=torch.bfloat16, device="meta")
PROBLEMS = {
    "bf16-nt": _EVEN,
    "f16-nn-odd": _problem(333, 221, 100, 77, torch.float16, "nn"),
    "bf16-tt-few-rows": _problem(16, 1024, 2048, 1000, layout="tt"),
    "f32-nt": _problem(128, 192, 256, 96, torch.float32),
    "tf32-tn": _problem(128, 192, 256, 96, torch.float32, "tn", "tf32"),
    "f64-nn": _problem(96, 80, 64, 130, torch.float64, "nn"),
    "bf16-turned": dataclasses.replace(_EVEN, c=_TURNED.c, d=_TURNED.d),
    "bf16-offset": dataclasses.replace(_EVEN, c=dataclasses.replace(_EVEN.c, offset=1)),
    "bf16-row-repeated": dataclasses.replace(_EVEN, c=Layout(size=(256, 256), stride=(0, 1), dtype=torch.bfloat16)),
    "bf16-long": _problem(64, 64, 8192, 4000),
    "bf16-relu": dataclasses.replace(_EVEN, epilogue=trace(lambda acc, x: torch.relu(acc + x), torch.float32, [_ROW])),
    "f16-reduced": dataclasses.replace(_problem(64, 64, 4096, 4096, torch.float16), precision=Precision(reduced_partials=True)),
}


def _choices(problem: Problem) -> list[Choice]:
    """torch's, a few of the search, one that splits, and variants."""
    found = list(offers_for(problem, detect("cuda"), dataclasses.replace(current(), search="default")).choices)
    torchs = [choice for choice in found if choice.baseline]
    ours = [choice for choice in found if choice.backend == "triton"]
    split = [choice for choice in ours if choice.info["splits"] > 1][:1]
    few = [*ours[:2], *split]
    return [*torchs, *few, *(variant for choice in few[:1] for variant in choice.launch_variants())]


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[Choice]]:
    """The choices of each problem, all compiled at once."""
    found = {name: _choices(problem) for name, problem in PROBLEMS.items()}
    assert not precompile([choice for choices in found.values() for choice in choices], current())
    return found


@pytest.mark.parametrize("name", PROBLEMS)
def test_verification_accepts_every_choice_with_its_own_claims(compiled: dict[str, list[Choice]], name: str) -> None:
    problem, choices = PROBLEMS[name], compiled[name]
    assert len(choices) >= 3
    verifier = Verifier(problem, CUDA)
    for choice in choices:
        verdict = verifier.check(choice, choice.build())
        assert verdict.status is Status.OK, (choice.name, verdict.reason)


@pytest.mark.parametrize("split_k", [2, 3, 5])
def test_a_split_may_lie_within_either_product_or_across_both(split_k: int) -> None:
    problem, device = _problem(65, 70, 150, 300, torch.float16), detect("cuda")
    config = Config(block_m=32, block_n=32, block_k=32, stages=3, warps=4, split_k=split_k)
    assert predicate_for(problem, device).check(config) is None
    choice = SumChoice.of(problem, device, config)
    verdict = Verifier(problem, CUDA).check(choice, choice.build())
    assert verdict.status is Status.OK, verdict.reason


@pytest.fixture
def tuned(own_store):
    forget_plans()
    with settings.patch(search="quick", backends=("aten", "triton")):
        yield


def _tensors(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    g = torch.Generator(device="cuda").manual_seed(0)
    sizes = ((64, 256), (256, 96), (64, 128), (128, 96))
    return [torch.randn(size, generator=g, device="cuda").to(dtype) for size in sizes]


def _error(got: torch.Tensor, operands: list[torch.Tensor]) -> float:
    a, b, c, d = (x.double() for x in operands)
    want = a @ b + c @ d
    return float((got.double() - want).abs().max() / want.abs().max())


@pytest.mark.slow
def test_calls_with_and_without_out(tuned) -> None:
    operands = _tensors()
    for _ in range(2):
        assert _error(gemmtune.mm_plus_mm(*operands), operands) < 1e-2
    out = torch.full((96, 64), torch.nan, dtype=torch.bfloat16, device="cuda").t()
    assert gemmtune.mm_plus_mm(*operands, out=out) is out
    assert _error(out, operands) < 1e-2


def test_a_captured_call_reads_c_and_d_when_it_is_replayed(tuned) -> None:
    operands = _tensors()
    gemmtune.mm_plus_mm(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gemmtune.mm_plus_mm(*operands)
    for x in operands[2:]:
        x.mul_(-2)
    graph.replay()
    torch.cuda.synchronize()
    assert _error(result, operands) < 1e-2


def test_gradients_are_torchs(tuned) -> None:
    operands = [x.requires_grad_() for x in _tensors(torch.float32)]
    with settings.patch(backends=("aten",)):
        gemmtune.mm_plus_mm(*operands).square().sum().backward()
    ours = [x.grad for x in operands]
    for x in operands:
        x.grad = None
    torch.addmm(torch.mm(operands[2], operands[3]), operands[0], operands[1]).square().sum().backward()
    for mine, x in zip(ours, operands, strict=True):
        assert torch.allclose(mine, x.grad, rtol=1e-3, atol=1e-1)
