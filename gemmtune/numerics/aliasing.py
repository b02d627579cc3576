"""Operands that share memory: mm(x, x), mm(x, x.t()) and overlapping views.

These find kernels that identify operands by their addresses. A problem whose a and b have equal layouts is mm(x, x).
With transposed layouts it is mm(x, x.t()).
"""

import dataclasses
from typing import Any, Literal

import torch

from ..problem import Layout, Problem
from .buffers import allocate
from .operands import Operands

Sharing = Literal["same start", "overlapping"]
"""Placement of the operands: all at one address, or each starting in the middle of the one before it."""

_ALIGNMENT_BYTES = 256
"""Granularity of the shifts, which keeps the addresses aligned for the layouts."""


def can_share(problem: Problem) -> bool:
    """Return True if a and b have one dtype and may be views of the same numbers."""
    return (
        problem.a.dtype == problem.b.dtype
        and not problem.encoding
        and problem.sparsity is None
        and problem.k > 0
        and not problem.empty
    )


def is_product_with_itself(problem: Problem) -> bool:
    """Return True if b may be a or its transpose, which callers write as mm(x, x) and mm(x, x.t())."""
    return can_share(problem) and problem.b in (problem.a, problem.a.transposed)


def in_one_buffer(problem: Problem, operands: Operands, how: Sharing = "same start", *, seed: int = 0) -> Operands:
    """Return ``operands`` with a, b and every c, d and inp of the same dtype as views of one buffer.

    The problem must satisfy ``can_share``. All numbers in the buffer are −1, 0 and 1. The reference of
    ``expectation.referenced(..., integers=True)`` is therefore exact. Scales and scalars stay, and so does an inp that
    must not be read.
    """
    layouts = {name: getattr(problem, name) for name in ("a", "b", "c", "d", "inp")}
    if problem.beta == "zero":
        del layouts["inp"]
    shared: dict[str, Layout] = {name: x for name, x in layouts.items() if x is not None and x.dtype == problem.a.dtype}
    itemsize = problem.a.dtype.itemsize
    step = (
        0 if how == "same start" else max(_ALIGNMENT_BYTES, problem.a.span * itemsize // 2 // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES)
    )
    starts = {name: number * step // itemsize for number, name in enumerate(shared)}
    size = max(starts[name] + layout.offset + layout.span for name, layout in shared.items())
    device = operands.a.device
    generator = torch.Generator(device=device).manual_seed(seed)
    buffer = allocate(Layout.contiguous((size,), problem.a.dtype), device)
    buffer.copy_(torch.randint(-1, 2, (size,), generator=generator, dtype=torch.int8, device=device))
    views: dict[str, Any] = {
        name: buffer.as_strided(layout.size, layout.stride, buffer.storage_offset() + starts[name] + layout.offset)
        for name, layout in shared.items()
    }
    return dataclasses.replace(operands, **views)
