"""The error bound for 8-bit inputs: int8 is exact, 8-bit floats have the few bits that tensor cores keep."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from bound_cases import orders, ratio, scaled
from broken_kernels import CPU, claims_of, tensor_core

from gemmtune.numerics.bounds import accumulation_bound, exact_limit
from gemmtune.numerics.fills import FILLS, fills_of
from gemmtune.numerics.probes import Probes
from gemmtune.problem import Problem

F32, F16, INT8, INT32 = torch.float32, torch.float16, torch.int8, torch.int32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
M, N, K = 5, 7, 61
PROBLEMS = {
    "int8": Problem.int_mm(M, N, K, device_type="cpu"),
    "e4m3 tensor": Problem.scaled_mm(M, N, K, device_type="cpu"),
    "e4m3 row": Problem.scaled_mm(M, N, K, scales="row", out_dtype=F32, device_type="cpu"),
    "e5m2 e4m3 row": Problem.scaled_mm(M, N, K, dtype=E5M2, dtype_b=E4M3, scales="row", out_dtype=F16, device_type="cpu"),
}


@pytest.mark.parametrize(("name", "fill"), [(name, fill) for name, p in PROBLEMS.items() for fill in fills_of(p.dtype)])
def test_right_kernels_stay_within(name: str, fill: str) -> None:
    problem = PROBLEMS[name]
    claims = claims_of(problem.dtype, splits=4, accumulate=problem.accumulator)
    for other in ("normal", fill):
        operands = Probes(problem, CPU).filled(fill, other)
        a, b = (x.to(problem.accumulator) for x in (operands.a, operands.b))
        for order, product in orders(problem.accumulator).items():
            out = scaled(product(a, b), operands, problem.out.dtype)
            assert ratio(problem, claims, operands, out) <= (0 if name == "int8" else 1), (order, other)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("fast_accum", [False, True], ids=["promoted", "fast"])
def test_the_14_bits_of_tensor_cores_stay_within(fast_accum: bool, fill: str) -> None:
    unit = tensor_core(14, promoted_every=None if fast_accum else 128)
    for dtype in (E4M3, E5M2):
        problem = Problem.scaled_mm(
            3, 4, 1024, dtype=dtype, dtype_b=E4M3, out_dtype=F32, scales="row", fast_accum=fast_accum, device_type="cuda"
        )
        for other in ("normal", fill):
            operands = Probes(problem, CPU).filled(fill, other)
            out = scaled(unit(operands.a.float(), operands.b.float()), operands, F32)
            assert ratio(problem, claims_of(dtype), operands, out) <= 1


def test_a_sum_in_14_bits_exceeds_more_exact_claims() -> None:
    def worst(k: int, **claimed: int) -> float:
        problem = Problem.scaled_mm(2, 3, k, out_dtype=F32, device_type="cuda")
        operands = Probes(problem, CPU).filled("uniform", "uniform")
        out = tensor_core(14, promoted_every=128 if claimed else None)(operands.a.float(), operands.b.float())
        return ratio(problem, claims_of(E4M3, **claimed), operands, scaled(out, operands, F32))

    assert worst(8192) == math.inf  # to the end, where it has to be promoted
    assert worst(1024, accumulator_bits=24) == math.inf


@pytest.mark.parametrize("bits", [24, 22])
def test_declared_bits_of_the_accumulator(bits: int) -> None:
    problem = Problem.mm(3, 4, 1024, dtype=F16, device_type="cuda")
    problem = dataclasses.replace(problem, out=dataclasses.replace(problem.out, dtype=F32))
    operands = Probes(problem, CPU).filled("uniform", "uniform")
    out = tensor_core(bits, width=16)(operands.a.float(), operands.b.float())
    assert ratio(problem, claims_of(F16, accumulator_bits=bits), operands, out) <= 1


def test_int32_results_are_exact_or_wrong() -> None:
    problem = PROBLEMS["int8"]
    operands = Probes(problem, CPU).random()
    out = (operands.a.long() @ operands.b.long()).int()
    claims = claims_of(INT8, accumulate=INT32, partials=INT32, epilogue_input=INT32)
    assert ratio(problem, claims, operands, out) == 0
    out[3, 5] += 1
    assert ratio(problem, claims, operands, out) == math.inf
    assert 0 < ratio(problem, claims_of(INT8), operands, out) <= 1, "float32 sums, if declared, need not be exact"


def relative(*, device_type: str = "cuda", fast_accum: bool = False, **claimed: Any) -> float:
    problem = Problem.scaled_mm(M, N, 4096, device_type=device_type, fast_accum=fast_accum)
    return accumulation_bound(problem, claims_of(E4M3, **claimed), alpha=1).relative


def test_formula() -> None:
    assert relative() == pytest.approx((128 + 32) * 2**-13 + (32 + 4) * 2**-23, rel=2e-2)
    assert relative(fast_accum=True) == pytest.approx(math.expm1((4096 + 1024) * 2**-13), rel=1e-2)
    full = (4096 + 1024 + 4) * 2**-23
    assert relative(accumulator_bits=24) == pytest.approx(full, rel=1e-3)
    assert relative(device_type="cpu") == pytest.approx(full / 2, rel=1e-3)
    assert relative(accumulator_bits=20, device_type="cpu", fast_accum=True) == pytest.approx((4096 + 1024) * 2**-20, rel=1e-2)
    exact = accumulation_bound(PROBLEMS["int8"], claims_of(INT8, accumulate=INT32, partials=INT32, epilogue_input=INT32), alpha=1)
    assert (exact.relative, exact.absolute) == (0, 0)


def test_exact_limit() -> None:
    on_gpu = Problem.scaled_mm(M, N, K, device_type="cuda")
    assert exact_limit(on_gpu, claims_of(E4M3)) == 2**13
    assert exact_limit(on_gpu, claims_of(E4M3, accumulator_bits=24)) == 2**23
    assert exact_limit(PROBLEMS["e4m3 row"], claims_of(E4M3)) == 2**23
    assert exact_limit(PROBLEMS["int8"], claims_of(INT8, accumulate=INT32, partials=INT32)) == 2**30 - 1
    assert exact_limit(PROBLEMS["int8"], claims_of(INT8)) == 2**23
