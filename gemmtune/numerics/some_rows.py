"""A call on some rows of another call's operands, to test if a row's bits depend on other rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..problem import Layout, Problem
from .buffers import allocate, placed, storage_bits
from .operands import Operands


def some_rows(operands: Operands, part: Problem, begin: int) -> Operands:
    """Return the operands of ``part``, a problem with fewer rows, cut from the call's operands at row ``begin``.

    An operand with one line for each row of the call loses the other rows. An operand for all rows, or not laid out along
    them, stays. If scales of a are for blocks of rows, ``begin`` is 0.
    """

    def cut(layout: Layout | None, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if layout is None or tensor is None or layout.size == tuple(tensor.shape):
            return tensor
        made = placed(layout, tensor.device, None)
        _bits(made).copy_(_bits(tensor)[..., begin : begin + layout.size[-2], :])
        return made

    epilogue = part.epilogue.operands if part.epilogue is not None else ()
    named: dict[str, Any] = {role: cut(layout, getattr(operands, role)) for role, layout in part.operands}
    return dataclasses.replace(
        operands,
        **named,
        out=allocate(part.out, operands.a.device),
        extra=tuple(x for layout, tensor in zip(epilogue, operands.extra, strict=True) if (x := cut(layout, tensor)) is not None),
    )


def same_rows(whole: torch.Tensor, part: torch.Tensor, begin: int) -> bool:
    """Return True if ``part`` has the bits of the result ``whole`` from row ``begin`` on."""
    return torch.equal(_bits(whole)[..., begin : begin + part.shape[-2], :], _bits(part))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers, which are equal only if every bit is."""
    return tensor.view(storage_bits(tensor).dtype)
