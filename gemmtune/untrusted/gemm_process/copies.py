"""Copies of operands as programs have them: inside of wider matrices, parts of one, parameters, memory that cannot be written."""

from __future__ import annotations

import builtins
import ctypes
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

TENSOR, STRIDED = torch.Tensor, torch.strided
MOST_WIDER = 2**23
"""Most elements between the rows of a part of a wider matrix."""


def copied(x: Any, offset: int, changed: Sequence[float] | None, wider: int = 0, spare: int = 0) -> Any:
    """Return a copy of a tensor after so many elements. If it is ``changed``, its columns go from the last to the first.

    Two shares of its sides are the place of the only number that is another one. Rows are those of a matrix that is ``wider`` by
    so many columns. Its memory has so many ``spare`` elements after it.
    """
    if not isinstance(x, TENSOR) or x.layout != STRIDED:
        return x
    copy = x.clone()
    if offset or wider or spare:
        wide = wider and copy.dim() == 2 and copy.stride(1) == 1
        steps = (copy.stride(0) + min(wider, MOST_WIDER // max(len(copy), 1)), 1) if wide else copy.stride()
        span = 1 + sum((size - 1) * step for size, step in zip(copy.shape, steps, strict=True))
        copy = x.new_ones(max(span, 0) + offset + spare).as_strided(copy.shape, steps, offset).copy_(x)
    if changed:
        place: Any = (..., *(int(share * size) for share, size in zip(changed, x.shape[-2:], strict=False)))
        copy[place] = copy[place] == 0
        return copy
    return copy if changed is None else copy.copy_(x.flip(-1))


def mapped(x: Any, alignment: int) -> Any:
    """Return a copy of a tensor in memory that cannot be written, as that of weights is that are mapped from a file.

    It ends with its page, but for its ``alignment`` in bytes. What comes next cannot be read.
    """
    if not isinstance(x, TENSOR) or x.layout != STRIDED or not x.numel() or not x.is_contiguous():
        return x
    whole = -(-(nbytes := x.numel() * x.element_size()) // (page := mmap.PAGESIZE)) * page
    room, begin = mmap.mmap(-1, whole + page), (whole - nbytes) // alignment * alignment
    copy = torch.frombuffer(room, dtype=x.dtype, offset=begin, count=x.numel()).view(x.shape).copy_(x.detach())
    for at, size, allowed in ((0, whole, mmap.PROT_READ), (whole, page, 0)):
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(copy.data_ptr() - begin + at), ctypes.c_size_t(size), allowed)
    return copy


def weight(manner: Mapping[str, Any], x: Any) -> Any:
    """Return the last argument as a manner has it: in memory that cannot be written, as a parameter, or as it is."""
    x = mapped(x, manner["mapped"]) if manner["mapped"] else x
    return torch.nn.Parameter(x, requires_grad=manner["trained"]) if manner["parameter"] else x


def in_one(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of a and b as parts of one matrix, as queries and keys are, a with its transpose, or a twice."""
    if torch.equal(a, b):
        return a, a
    whole = a if torch.equal(a, b.mT) else torch.cat([a, b.mT], -1)
    return whole[..., : a.shape[-1]], whole[..., -a.shape[-1] :].mT


def windows(x: torch.Tensor, step: int) -> torch.Tensor:
    """Return a matrix whose rows begin ``step`` elements after each other, as windows of a signal that have some in common."""
    rows, columns = x.shape
    return torch.cat([x[0], x[1:, columns - step :].flatten()]).as_strided((rows, columns), (step, 1))
