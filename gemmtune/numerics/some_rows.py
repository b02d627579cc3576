"""A call on some rows of another call's operands, to test if a row's bits depend on other rows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..problem import Layout, Problem
from .buffers import allocate, distinct_size, element_bits, placed
from .operands import Operands


def some_rows(operands: Operands, part: Problem, begin: int, make: Callable[[str, Layout], torch.Tensor] | None = None) -> Operands:
    """Return the operands of ``part``, a problem with fewer rows, cut from the call's operands at row ``begin``.

    An operand with one line for each row of the call loses the other rows. An operand for all rows, or not laid out along
    them, stays, unless it has no gaps where that of ``part`` has (``tight_problem``). If scales of a are for blocks of rows,
    ``begin`` is 0. ``make`` returns memory for an operand of a role, by default a buffer of its own with NaN around it.
    """
    device = operands.a.device

    def cut(role: str, layout: Layout, tensor: torch.Tensor) -> torch.Tensor:
        if layout.size == tuple(tensor.shape) and layout.span == Layout.of(tensor).span:
            return tensor
        made = placed(layout, device, None) if make is None else make(role, layout)
        own = tuple(map(slice, distinct_size(layout)))  # torch copies nothing to elements that share memory
        element_bits(made)[own].copy_(element_bits(tensor)[..., begin : begin + layout.size[-2], :][own])
        return made

    epilogue = part.epilogue.operands if part.epilogue is not None else ()
    named: dict[str, Any] = {role: cut(role, layout, getattr(operands, role)) for role, layout in part.operands}
    extra = [cut(f"extra {i}", layout, x) for i, (layout, x) in enumerate(zip(epilogue, operands.extra, strict=True))]
    return dataclasses.replace(
        operands,
        **named,
        out=allocate(part.out, device) if make is None else make("out", part.out),
        extra=tuple(extra),
    )


def same_rows(whole: torch.Tensor, part: torch.Tensor, begin: int) -> bool:
    """Return True if ``part`` has the bits of the result ``whole`` from row ``begin`` on."""
    return torch.equal(element_bits(whole)[..., begin : begin + part.shape[-2], :], element_bits(part))


def first_other_row(whole: torch.Tensor, part: torch.Tensor, begin: int) -> int | None:
    """Return the first row of ``part`` without the bits of ``whole`` from row ``begin`` on, or None. Any two NaN are equal."""
    rows = whole[..., begin : begin + part.shape[-2], :]
    if torch.equal(element_bits(rows), element_bits(part)):
        return None
    other = element_bits(rows) != element_bits(part)
    if part.is_floating_point():
        other &= ~(rows.isnan() & part.isnan())
    found = other.any(-1)
    found = found.any(0) if found.dim() > 1 else found
    return begin + int(found.int().argmax()) if bool(found.any()) else None
