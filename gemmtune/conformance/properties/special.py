"""Special numbers: NaN, infinities, and what may not be read.

Operands are small integers with NaN or infinities among them, so that every element of the result is known exactly.
"""

from __future__ import annotations

import math

import torch

from ...numerics.buffers import storage_bits
from ...numerics.operands import Operands
from ...numerics.reference import Region, as_batches, reference
from ...problem.dtypes import dtype_info
from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.scope import Scope
from ..labels import DTYPES
from .coverage import ADDED, Sample, Size, fitted
from .property import Property

__all__ = ["PROPERTIES", "added_needs", "expect_exactly"]

ZERO_BLOCK = 16
SHORT: tuple[Size, ...] = ((17, 33, 65), (64, 64, 64), (33, 40, 129), (128, 96, 31), (1, 48, 257), (65, 1, 48), (130, 129, 16))
"""K is short, so that sums of integers are exact in every dtype."""


def expect_exactly(bench: Bench, operands: Operands, *, name: str) -> bool:
    """The result of operands of which float64 sums, and so all others, are exact but for NaN, infinities and the last rounding."""
    result = bench.call(operands)
    expected = reference(operands, Region()).value.to(result.dtype).reshape(result.shape)
    if bench.claims.skips_zeros:  # 0 · NaN and 0 · ∞ are what the GEMM makes of them
        expected = torch.where(expected.isnan(), result, expected)
    return bench.expect_equal(result, expected, operands, name=name)


def check_nan(bench: Bench) -> None:
    """One NaN in a, b or the added operand (the variant): what depends on it is NaN, and nothing else."""
    where = bench.case.variant or "a"
    operands = bench.probes.integers()
    tensor = {"a": operands.a, "b": operands.b, "c": operands.inp}[where[0]]
    if tensor is None:  # a drawn case of an operation that adds nothing
        tensor = operands.a
    places = {"first": [0] * tensor.dim(), "last": [size - 1 for size in tensor.shape]}
    _put(tensor, tuple(places.get(where[2:], [size // 2 for size in tensor.shape])), math.nan)
    expect_exactly(bench, operands, name=f"NaN in {where[0]}")


def check_infinity(bench: Bench) -> None:
    """Infinities in a or b (the variant) times 1, −1 and 0; one line has two of different sign, which is NaN where both count."""
    which = bench.case.variant or "a"
    operands = bench.probes.integers()
    lines = as_batches(operands.a) if which == "a" else as_batches(operands.b).mT
    count, k = lines.shape[-2:]
    _put(lines, (-1, count // 2, 0), math.inf)
    _put(lines, (-1, count // 2, k - 1), -math.inf)
    _put(lines, (-1, 0, k // 2), math.inf)
    _put(lines, (-1, count - 1, k - 1), -math.inf)
    expect_exactly(bench, operands, name=f"infinities in {which}")


def check_zeros(bench: Bench) -> None:
    """Zeros in one operand against NaN or infinities in the other: a third of its lines, a block, a range of K, all of it.

    The variant is the operand with the zeros, where they are, and the other number.
    """
    which, where, value = (bench.case.variant or "a.lines.nan").split(".")
    operands = bench.probes.integers()
    a, b = as_batches(operands.a), as_batches(operands.b).mT
    lines, others = (a, b) if which == "a" else (b, a)
    count, k = lines.shape[-2:]
    middle = k // 2 // ZERO_BLOCK * ZERO_BLOCK
    rows = {"lines": slice(count // 3, count - count // 3), "block": slice(0, ZERO_BLOCK)}.get(where, slice(None))
    inner = slice(middle, middle + ZERO_BLOCK) if where in ("block", "range") else slice(None)
    lines[..., rows, inner].copy_(torch.zeros((), dtype=torch.float32))
    _put(others, (slice(None), -1, middle), math.inf if value == "inf" else math.nan)
    _put(others, (slice(None), 0, min(middle + 1, k - 1)), -math.inf if value == "inf" else math.nan)
    expect_exactly(bench, operands, name=f"zeros in {which} against {value} ({where})")


def _put(tensor: torch.Tensor, index: tuple[int | slice, ...], value: float) -> None:
    """One element, or one of each matrix; by a copy, since not every torch fills 8-bit floats."""
    tensor[index].copy_(torch.tensor(value))


def check_beta_zero(bench: Bench) -> None:
    """The added operand is not read with beta 0: all of it is NaN, or infinite (the variant)."""
    operands = bench.probes.integers()
    if bench.case.variant == "infinite" and operands.inp is not None:
        storage_bits(operands.inp, operands.inp.dtype).fill_(math.inf)
    expect_exactly(bench, operands, name="beta 0")


def added_needs(scope: Scope) -> str | None:
    """Why nothing about an added operand is tested."""
    return None if set(ADDED) & set(scope.tested_ops) else "neither addmm nor baddbmm is tested"


def _beta_needs(scope: Scope) -> str | None:
    return added_needs(scope) or (None if scope.traits.beta else "beta= is not declared")


def _has_nan(case: Case) -> bool:
    """A dtype with NaN, and a place for it: the added operand is there where the variant is c."""
    return not dtype_info(_dtype(case)).is_integer and (case.added or case.variant != "c")


def _has_infinity(case: Case) -> bool:
    """Zero points may give two infinities to subtract: whether there are is the kernel's choice."""
    return dtype_info(_dtype(case)).has_infinity and case.k > 1 and case.zeros == "no"


def _dtype(case: Case) -> torch.dtype:
    """That of the operand which the variant names."""
    return case.b_dtype if case.variant.startswith("b") else DTYPES[case.dtype]


def _has_zeros(case: Case) -> bool:
    """The operand of the zeros can be written one number by one, and the other one has NaN or infinity."""
    which, _, value = case.variant.split(".")
    dtype = dtype_info(case.b_dtype if which == "a" else DTYPES[case.dtype])
    return not case.packed and case.zeros == "no" and not dtype.is_integer and (value == "nan" or dtype.has_infinity)


def _with_beta_zero(case: Case) -> Case:
    """alpha is 1 for odd M and as declared for even M, so that neither class is left out."""
    return case.changed(beta="zero", alpha="one" if case.m % 2 else case.alpha)


PROPERTIES = (
    Property(
        name="nan",
        meaning="a NaN reaches the elements that depend on it, and no others",
        check=check_nan,
        cases=Sample(
            name="nan",
            budget=(48, 160, 800),
            shapes=fitted(*SHORT),
            variants=("a", "b", "a.last", "b.last", "c", "a.first", "b.first"),
            admits=_has_nan,
        ),
    ),
    Property(
        name="infinity",
        meaning="infinities keep their signs; ∞ − ∞ and ∞ · 0 are NaN",
        check=check_infinity,
        cases=Sample(name="infinity", budget=(32, 160, 800), shapes=fitted(*SHORT), variants=("a", "b"), admits=_has_infinity),
    ),
    Property(
        name="zeros",
        meaning="lines, blocks and ranges of zeros against NaN and infinity give NaN",
        check=check_zeros,
        cases=Sample(
            name="zeros",
            budget=(48, 160, 800),
            shapes=fitted(*SHORT),
            variants=tuple(
                f"{which}.{where}.{value}"
                for where in ("lines", "block", "range", "all")
                for which in ("a", "b")
                for value in ("nan", "inf")
            ),
            admits=_has_zeros,
        ),
        needs=lambda scope: "skips_zeros is declared" if scope.traits.skips_zeros else None,
    ),
    Property(
        name="beta-zero",
        meaning="with beta 0 the added operand is not read, be it NaN or infinite",
        check=check_beta_zero,
        cases=Sample(
            name="beta-zero",
            budget=(24, 96, 400),
            shapes=fitted(*SHORT),
            variants=("", "infinite"),
            ops=ADDED,
            finish=_with_beta_zero,
        ),
        needs=_beta_needs,
    ),
)
