"""Probes, fills and bounds of 8-bit inputs on a GPU, and the width probe of all: torch's own operations pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from bound_cases import ratio
from broken_kernels import claims_of, split_k

from gemmtune.choice import Claims
from gemmtune.numerics.bounds import exact_limit
from gemmtune.numerics.expectation import OneHotExpectation
from gemmtune.numerics.fills import fills_of
from gemmtune.numerics.judging import Judge
from gemmtune.numerics.one_hot import OneHotProbe
from gemmtune.numerics.operands import Operands
from gemmtune.numerics.probes import Probes
from gemmtune.problem import Precision, Problem
from gemmtune.problem.flags import precision_scope

pytestmark = pytest.mark.gpu
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [(64, 48, 32), (256, 272, 4096), (17, 512, 8192)]


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def by_torch(problem: Problem, x: Operands) -> torch.Tensor:
    match problem.op:
        case "mm":
            return x.a @ x.b
        case "int_mm":
            return torch._int_mm(x.a, x.b)
    return torch._scaled_mm(x.a, x.b, x.scale_a, x.scale_b, out_dtype=problem.out.dtype, use_fast_accum=problem.fast_accum)


def claims_for(problem: Problem) -> Claims:
    sums, mode = problem.accumulator, problem.precision.input_mode
    return claims_of(
        problem.dtype,
        accumulate=sums,
        partials=sums,
        epilogue_input=sums,
        splits=16,
        input_mode=mode,
        flush_subnormals=mode == "tf32",
    )


def picks(problem: Problem, claims: Claims, device: torch.device) -> Iterator[OneHotProbe]:
    probes = Probes(problem, device)
    random, limit = probes.random(), exact_limit(problem, claims)
    yield probes.cancel(limit)
    yield probes.width(limit)
    yield probes.rows_of_b(random.b)
    yield probes.cols_of_a(random.a)
    yield probes.both(random)


def assert_holds(problem: Problem, device: torch.device) -> None:
    claims = claims_for(problem)
    for pick in picks(problem, claims, device):
        finding = Judge(problem, claims).find(by_torch(problem, pick.operands), OneHotExpectation.of(pick))
        bad = finding.bad_element(finding.state.tolist(), batched=False)
        assert bad is None, (str(problem), pick.name, bad)
    for fill in fills_of(problem.dtype):
        for other in ("normal", fill):
            operands = Probes(problem, device).filled(fill, other)
            worst = ratio(problem, claims, operands, by_torch(problem, operands))
            assert worst <= 1, (str(problem), fill, other)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_torchs_int_mm_is_exact(cuda: torch.device, size: tuple[int, int, int]) -> None:
    assert_holds(Problem.int_mm(*size, device_type="cuda"), cuda)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="8-bit floats need compute capability 8.9"
)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("fast_accum", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize(
    ("dtype", "dtype_b", "out_dtype", "scales"),
    [(E4M3, E4M3, BF16, "tensor"), (E4M3, E4M3, F32, "tensor"), (E5M2, E4M3, F16, "tensor"), (E4M3, E4M3, BF16, "row")],
    ids=str,
)
def test_torchs_scaled_mm_stays_within(
    cuda: torch.device,
    dtype: torch.dtype,
    dtype_b: torch.dtype,
    out_dtype: torch.dtype,
    scales: str,
    fast_accum: bool,
    size: tuple[int, int, int],
) -> None:
    problem = Problem.scaled_mm(
        *size, dtype=dtype, dtype_b=dtype_b, out_dtype=out_dtype, scales=scales, fast_accum=fast_accum, device_type="cuda"
    )  # type: ignore[arg-type]
    assert_holds(problem, cuda)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "mode"), [(F16, "ieee"), (BF16, "ieee"), (F32, "ieee"), (F32, "tf32"), (torch.float64, "ieee")], ids=str
)
def test_torchs_mm_passes(cuda: torch.device, dtype: torch.dtype, mode: str, size: tuple[int, int, int]) -> None:
    problem = Problem.mm(*size, dtype=dtype, device_type="cuda", precision=Precision(input_mode=mode))  # type: ignore[arg-type]
    with precision_scope(problem):
        assert_holds(problem, cuda)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_narrow_partials_fail_the_width_probe(cuda: torch.device, dtype: torch.dtype) -> None:
    problem = Problem.mm(256, 64, 4096, dtype=dtype, device_type="cuda")
    claims = claims_for(problem)
    pick = Probes(problem, cuda).width(exact_limit(problem, claims))
    for narrow in (False, True):
        out = split_k(dtype if narrow else F32, 4)(pick.operands.a.float(), pick.operands.b.float()).to(dtype)
        assert bool(Judge(problem, claims).find(out, OneHotExpectation.of(pick)).state[0]) == narrow
