"""The ends of the range: overflow to infinity, subnormal numbers."""

from __future__ import annotations

import math

import torch

from ...problem.dtypes import dtype_info
from ...problem.operations import DENSE_OPS
from ..bench.bench import Bench
from ..cases.case import Case
from ..labels import DTYPES
from .coverage import Sample, Size, fitted
from .property import Property
from .special import expect_exactly

__all__ = ["PROPERTIES"]

_SIZES: tuple[Size, ...] = ((33, 65, 64), (64, 64, 31), (17, 128, 129), (96, 40, 257), (5, 6, 16))
ABOUT = 4
"""Products that are not 0 in an element, on average; so many of them overflow."""


def check_overflow(bench: Bench) -> None:
    """Sums beyond the largest number are infinite, those up to it are not; in the variant ``largest`` they just reach it.

    All terms of an element have one sign and are multiples of one power of two, so that the order of summation does not matter.
    """
    largest = dtype_info(bench.problem.out.dtype).largest - _cut_off(bench, 2.0**104)
    operands = bench.probes.integers()
    a, b = operands.a, operands.b
    if bench.case.variant == "largest":
        one_hot = torch.zeros(a.shape, device=bench.device)
        one_hot[..., torch.arange(a.shape[-2], device=bench.device), _draw(bench, (a.shape[-2],), 0, a.shape[-1] - 1)] = 1
        a.copy_(one_hot)
        b.copy_(largest * _signs(bench, tuple(b.shape)))
    else:
        half = 2.0 ** (math.frexp(largest)[1] // 2 - 1)
        a.copy_(half * _sparse(bench, tuple(a.shape)) * _signs(bench, (*a.shape[:-1], 1)))
        b.copy_(half * _sparse(bench, tuple(b.shape)) * _signs(bench, (*b.shape[:-2], 1, b.shape[-1])))
    if operands.inp is not None:
        operands.inp.zero_()
    expect_exactly(bench, operands, name="overflow")


def check_subnormal(bench: Bench) -> None:
    """Sums of subnormal numbers, or in the variant ``results`` of normal ones that are subnormal, are exact.

    Where flushing is declared, they may be 0.
    """
    operands = bench.probes.integers()
    a, b = operands.a, operands.b
    if bench.case.variant == "results":
        exponent = round(math.log2(dtype_info(bench.problem.out.dtype).smallest_subnormal))
        units = (2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2))
    else:
        smallest = dtype_info(bench.problem.a.dtype).smallest_subnormal
        units = (smallest + _cut_off(bench, smallest), 1.0)
    a.copy_(_draw(bench, tuple(a.shape), -2, 2).double() * units[0])
    b.copy_(_draw(bench, tuple(b.shape), -2, 2).double() * units[1])
    if operands.inp is not None:
        operands.inp.zero_()
    if bench.claims.flush_subnormals:
        bench.expect(bench.call(operands), operands, name="subnormal numbers")
    else:
        expect_exactly(bench, operands, name="subnormal numbers")


def _cut_off(bench: Bench, unit: float) -> float:
    """The last 13 bits of a float32 whose last place is ``unit``, which an input has not where it is read as tf32; else 0."""
    return (2**13 - 1) * unit if bench.problem.precision.input_mode == "tf32" else 0.0


def _draw(bench: Bench, size: tuple[int, ...], low: int, high: int) -> torch.Tensor:
    return torch.randint(low, high + 1, size, generator=bench.generator, device=bench.device)


def _signs(bench: Bench, size: tuple[int, ...]) -> torch.Tensor:
    return _draw(bench, size, 0, 1).double() * 2 - 1


def _sparse(bench: Bench, size: tuple[int, ...]) -> torch.Tensor:
    """Zeros and ones, so many that of two such matrices ABOUT products are not 0 in an element."""
    density = min(1.0, math.sqrt(ABOUT / bench.problem.k))
    return (torch.rand(size, generator=bench.generator, device=bench.device) < density).double()


def _subnormal(case: Case) -> bool:
    """Products of 8-bit floats are not subnormal in 16 bits; the last bits of tf32's subnormal numbers are cut off."""
    return case.op in DENSE_OPS or (case.row.float8 and case.variant == "")


_NOT_TF32 = tuple(name for name in DTYPES if name != "tf32")


PROPERTIES = (
    Property(
        name="overflow",
        meaning="results beyond the largest number are the right infinity, and only those",
        check=check_overflow,
        cases=Sample(
            name="overflow",
            budget=(32, 96, 400),
            shapes=fitted(*_SIZES),
            variants=("", "largest"),
            ops=DENSE_OPS,
            finish=lambda case: case.changed(alpha="one", beta="one"),
        ),
    ),
    Property(
        name="subnormal",
        meaning="subnormal inputs and results are kept, or become 0 where that is declared",
        check=check_subnormal,
        needs=lambda scope: "flush_subnormals is not declared" if scope.traits.flush_subnormals is None else None,
        cases=Sample(
            name="subnormal",
            budget=(32, 96, 400),
            shapes=fitted(*_SIZES),
            variants=("", "results"),
            admits=_subnormal,
            dtypes=_NOT_TF32,
        ),
    ),
)
