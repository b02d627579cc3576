"""Rows on which another order of summation shows: cancellation, wide exponents, subnormal numbers, NaN and infinities."""

from __future__ import annotations

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
_OF_NORMAL = 3
"""Bits of exponent that standard normal numbers need themselves."""


def with_hard_rows(problem: Problem, operands: Operands) -> Operands | None:
    """Return the operands with each row of a of the next of KINDS. The tensors are changed in place.

    A cancelling row has −x in the second half of K for each x in the first, in another order, and b has equal rows there. Its sums
    are rounding errors alone, in which any change of order shows. Return None if a is no float, or its elements share memory.
    """
    a, dtype = operands.a, problem.a.dtype
    if not dtype.is_floating_point or not _separate(problem.a) or not problem.k:
        return None
    generator = torch.Generator(device=a.device).manual_seed(len(KINDS))
    info, widest = dtype_info(dtype), _WIDEST.get(dtype, int(math.log2(torch.finfo(dtype).max)) - _OF_NORMAL)
    kinds = torch.arange(a.shape[-2], device=a.device) % len(KINDS)
    kinds[[0, -1]] = KINDS.index("cancelling")
    values = a.to(torch.float64)
    exponents = torch.randint(-widest, widest + 1, values.shape, generator=generator, device=a.device)
    wide = values * torch.exp2(exponents.double())
    first, second = _pairs(operands, problem, generator)
    cancelling = wide.clone()
    cancelling[..., second] = -cancelling[..., first]
    place, special = problem.k // 2, values.clone()
    special[..., place] = torch.nan
    infinite = values.clone()
    infinite[..., place] = torch.inf
    made = {
        "cancelling": cancelling,
        "wide": wide,
        "subnormal": values * info.smallest_normal / 4,
        "nan": special,
        "infinite": infinite,
    }
    for name, rows in made.items():
        values = torch.where((kinds == KINDS.index(name))[:, None], rows, values)
    a.copy_(values.float().to(dtype) if dtype in FLOAT8 else values.to(dtype))
    return dataclasses.replace(operands)


def _pairs(operands: Operands, problem: Problem, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Make rows of b in the second half equal to those of the first, in another order. Return both places along K.

    A row of packed numbers has several of K. Block-sparse weights and operands that share memory stay as they are.
    """
    b = operands.b
    lines = b.shape[-2] // 2
    order = torch.randperm(lines, generator=generator, device=b.device)
    second = lines + torch.arange(lines, device=b.device)
    if operands.weight is None and _separate(problem.b):
        bits = element_bits(b)
        bits[..., second, :] = bits[..., order, :]
    each = max(problem.k // max(b.shape[-2], 1), 1)
    inside = torch.arange(each, device=b.device)
    places = ((x[:, None] * each + inside).flatten() for x in (order, second))
    return tuple(places)  # type: ignore[return-value]


def _separate(layout: Layout) -> bool:
    """Return True if elements of an operand can be chosen freely."""
    return not overlapping(layout) and distinct_size(layout) == layout.size
