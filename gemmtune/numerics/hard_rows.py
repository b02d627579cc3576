"""Rows on which another order of summation shows: cancellation, wide exponents, subnormal numbers, NaN and infinities."""

import dataclasses
import math

import torch

from ..problem import Layout, Problem
from ..problem.dtypes import FLOAT8, dtype_info
from .buffers import distinct_size, element_bits, overlapping
from .operands import Operands

KINDS = ("cancelling", "wide", "subnormal", "nan", "infinite", "random")
"""Kinds of rows, in turn. The first and the last row are cancelling too, so that every batch has one."""
_WIDEST = {torch.float16: 5, torch.bfloat16: 20, torch.float32: 20, torch.float64: 60}
"""Largest exponent of two by which numbers are scaled. 8-bit floats use their whole range."""
_SPECIAL = {"nan": torch.nan, "infinite": torch.inf}
_OF_NORMAL = 3
"""Bits of exponent that standard normal numbers need themselves."""


def with_hard_rows(problem: Problem, operands: Operands) -> Operands | None:
    """Return the operands with each row of a of the next of KINDS, in place; None if a is no float or shares memory.

    A cancelling row has −x in the second half of K for each x in the first, where b is equal: its sums are pure rounding errors.
    """
    a, dtype = operands.a, problem.a.dtype
    if not dtype.is_floating_point or not _separate(problem.a) or not problem.k:
        return None
    generator = torch.Generator(device=a.device).manual_seed(len(KINDS))
    first, second = _pairs(operands, problem, generator)
    kinds = torch.arange(a.shape[-2], device=a.device) % len(KINDS)
    kinds[[0, -1]] = KINDS.index("cancelling")
    for number, name in enumerate(KINDS[:-1]):
        rows = (kinds == number).nonzero()[:, 0]
        values = a[..., rows, :].to(torch.float64)
        if name in ("cancelling", "wide"):
            values *= _powers(values, dtype, generator)
        if name == "cancelling":
            values[..., second] = -values[..., first]
        if name == "subnormal":
            values *= dtype_info(dtype).smallest_normal / 4
        if name in _SPECIAL:
            values[..., problem.k // 2] = _SPECIAL[name]
        made = values.float().to(dtype) if dtype in FLOAT8 else values.to(dtype)
        element_bits(a)[..., rows, :] = element_bits(made)
    return dataclasses.replace(operands)


def _powers(values: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return random powers of two within the range of a dtype."""
    widest = _WIDEST.get(dtype, int(math.log2(torch.finfo(dtype).max)) - _OF_NORMAL)
    return torch.exp2(torch.randint(-widest, widest + 1, values.shape, generator=generator, device=values.device).double())


def _pairs(operands: Operands, problem: Problem, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Make rows of b equal in both halves of K, in another order, unless elements share memory. Return both places along K."""
    b = operands.b
    lines = b.shape[-2] // 2
    order = torch.randperm(lines, generator=generator, device=b.device)
    second = lines + torch.arange(lines, device=b.device)
    if operands.weight is None and _separate(problem.b):
        bits = element_bits(b)
        if b.dtype in FLOAT8:  # sums of normal ones are exact in float32
            lines_of_b = torch.ones(b.shape[-2], 1, dtype=torch.float64, device=b.device)
            bits.copy_(element_bits((b.float() * _powers(lines_of_b, b.dtype, generator).float()).to(b.dtype)))
        bits[..., second, :] = bits[..., order, :]
    each = max(problem.k // max(b.shape[-2], 1), 1)
    inside = torch.arange(each, device=b.device)
    places = ((x[:, None] * each + inside).flatten() for x in (order, second))
    return tuple(places)  # type: ignore[return-value]


def _separate(layout: Layout) -> bool:
    """Return True if elements of an operand can be chosen freely."""
    return not overlapping(layout) and distinct_size(layout) == layout.size
