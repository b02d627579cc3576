"""The cpp backend's kernels for block-sparse weights: offers, and all values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from rotation import rotated

from gemmtune.backends.cpp.backend import CppBackend
from gemmtune.backends.cpp.bsr import BlockChoice
from gemmtune.choice import Status
from gemmtune.device import detect, preset
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings

CPU = torch.device("cpu")
F16, F32, F64, I8 = torch.float16, torch.float32, torch.float64, torch.int8
pytestmark = [pytest.mark.filterwarnings("ignore:Sparse BSR tensor support"), pytest.mark.rotates(8)]
WORDS = {"device_type": "cpu", "prepacked": True}


def _fused(problem: Problem, function: Callable[..., torch.Tensor], *extra: torch.Tensor) -> Problem:
    """Return the problem with an epilogue that reads ``extra``."""
    epilogue = trace(function, problem.epilogue_dtype, extra)
    out = dataclasses.replace(
        problem.out, dtype=epilogue.result_dtype or problem.operation.result_dtype(problem.dtype, epilogue=True)
    )
    return dataclasses.replace(problem, epilogue=epilogue, out=out)


ROWS, COLUMNS = torch.ones(37, 1), torch.ones(96)
FACTORS = lambda acc, left, right: acc * left * right  # noqa: E731
PROBLEMS = {
    "int8": Problem.bsr_mm(37, 96, 192, block=(16, 64), dtype=I8, **WORDS),
    "int8-odd": Problem.bsr_mm(3, 96, 60, block=(8, 6), dtype=I8, layout="tt", density=0.3, **WORDS),
    "int8-factors": _fused(Problem.bsr_mm(37, 96, 64, block=16, dtype=I8, imbalance="skewed", **WORDS), FACTORS, ROWS, COLUMNS),
    "e4m3": Problem.bsr_mm(17, 96, 64, block=(16, 8), dtype=torch.float8_e4m3fn, **WORDS),
    "e5m2-factors": _fused(
        Problem.bsr_mm(37, 96, 64, block=16, dtype=torch.float8_e5m2, layout="tt", density=0.2, **WORDS), FACTORS, ROWS, COLUMNS
    ),
    "fp32-factors": _fused(Problem.bsr_mm(37, 96, 64, block=(32, 8), dtype=F32, layout="tt", **WORDS), FACTORS, ROWS, COLUMNS),
    "bf16-sum-gelu": _fused(
        Problem.bsr_addmm(37, 96, 64, block=16, alpha=2, beta=0.5, **WORDS), lambda acc: torch.nn.functional.gelu(acc)
    ),
    "fp32": Problem.bsr_mm(17, 96, 64, block=16, dtype=F32, **WORDS),
    "bf16-sum": Problem.bsr_addmm(
        5, 48, 64, block=(16, 8), density=0.2, imbalance="skewed", wide_index=True, alpha=2, beta=0.5, **WORDS
    ),
    "fp16-transposed": Problem.bsr_mm(33, 128, 64, block=(64, 32), layout="tt", dtype=F16, density=0.3, **WORDS),
    "fp64-alpha-zero": Problem.bsr_addmm(1, 40, 64, block=(8, 4), dtype=F64, alpha=0, **WORDS),
    "fp32-none": Problem.bsr_mm(2, 40, 64, block=(8, 4), dtype=F32, density=0, **WORDS),
}


def choices(problem: Problem, arch: str | None = None) -> list[BlockChoice]:
    device = preset(arch) if arch else detect("cpu")
    return [choice for choice in CppBackend().enumerate(problem, device, Settings()).choices if isinstance(choice, BlockChoice)]


@pytest.mark.parametrize("name", PROBLEMS)
def test_values(name: str) -> None:
    problem = PROBLEMS[name]
    offered = choices(problem)
    for choice in rotated(offered, len(offered), name):
        verdict = Verifier(problem, CPU).check(choice, choice.build())
        assert verdict.status is Status.OK, (choice.name, verdict.reason)


def test_offers() -> None:
    names = [choice.name for choice in choices(PROBLEMS["fp32"], "avx512")]
    assert names == ["cpp:bsr_avx512_14x32", "cpp:bsr_avx512_30x16", "cpp:bsr_avx512_6x64"]
    assert [choice.name for choice in choices(PROBLEMS["fp32"], "avx2")] == ["cpp:bsr_avx2_6x16", "cpp:bsr_avx2_14x8"]
    joined = {choice.source.nr: choice.claims.skips_absent for choice in choices(PROBLEMS["fp32"], "avx512")}
    assert joined == {16: True, 32: False, 64: False}
    narrow = Problem.bsr_mm(8, 64, 64, block=4, dtype=F32, **WORDS)
    assert max(choice.source.nr for choice in choices(narrow, "avx512")) == 32


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Problem.bsr_mm(8, 64, 64, block=16, dtype=F32, device_type="cpu"), "the weight is not prepacked"),
        (Problem.bsr_mm(8, 64, 64, block=16, device_type="cuda", prepacked=True), "these kernels run on a CPU"),
    ],
)
def test_refusals(problem: Problem, reason: str) -> None:
    offers = CppBackend().enumerate(problem, preset("avx512"), Settings())
    assert offers.choices == ()
    assert reason in offers.refusals[0].reason
