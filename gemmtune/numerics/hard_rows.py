"""Rows on which another order of summation shows: wide exponents, cancellation, subnormal numbers, NaN and infinities."""

from __future__ import annotations

import dataclasses

import torch

from ..problem import Problem
from ..problem.dtypes import dtype_info
from .buffers import distinct_size, overlapping
from .operands import Operands

KINDS = 6
"""Rows of one kind follow each other at this distance: random, wide, cancelling, subnormal, with a NaN, with an infinity."""
_BITS_OF_EXPONENT = {torch.float16: 5, torch.bfloat16: 20, torch.float32: 20, torch.float64: 60}


def with_hard_rows(problem: Problem, operands: Operands) -> Operands | None:
    """Return the operands with each row of a of the next kind. b has equal neighbours along K, so that terms cancel.

    The tensors are changed in place. Return None if a is no wide float, or its elements share memory.
    """
    a, dtype = operands.a, problem.a.dtype
    if dtype not in _BITS_OF_EXPONENT or overlapping(problem.a) or distinct_size(problem.a) != problem.a.size or not problem.k:
        return None
    generator = torch.Generator(device=a.device).manual_seed(KINDS)
    info, most = dtype_info(dtype), _BITS_OF_EXPONENT[dtype]
    rows = torch.arange(a.shape[-2], device=a.device) % KINDS
    values = a.to(torch.float64)
    exponents = torch.randint(-most, most + 1, values.shape, generator=generator, device=a.device)
    values[..., rows == 1, :] = (values * torch.exp2(exponents.double()))[..., rows == 1, :]
    pairs = values[..., 0 : problem.k // 2 * 2 : 2]
    cancelling = torch.stack([pairs, -pairs], -1).flatten(-2)
    values[..., rows == 2, : cancelling.shape[-1]] = cancelling[..., rows == 2, :]
    values[..., rows == 3, :] = (values * info.smallest_normal / 4)[..., rows == 3, :]
    place = problem.k // 2
    for kind, special in ((4, torch.nan), (5, torch.inf)):
        values[..., rows == kind, place] = special
    a.copy_(values.to(dtype))
    b = operands.b
    if operands.weight is None and b.dtype == dtype and not overlapping(problem.b) and distinct_size(problem.b) == problem.b.size:
        even = b[..., 0 : problem.k // 2 * 2 : 2, :].clone()
        b[..., 1 : problem.k // 2 * 2 : 2, :].copy_(even)
    return dataclasses.replace(operands)
