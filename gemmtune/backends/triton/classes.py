"""Classes of integers and operands: what the compiler is told of them, so that one kernel serves many shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...problem import Layout

__all__ = ["INT32_LIMIT", "IntClass", "OperandClass", "divisor", "strides_of"]

ALIGNED_BYTES = 16
INT32_LIMIT = 2**31
STEP_LIMIT = 2**22
"""A stride of a matrix that reaches this is given in 64 bits, so that a step of up to 256 of them cannot overflow."""
WIDE_MARGIN = 2**24
"""Room below 2^31 for the index arithmetic of a tile that hangs over the edge of an operand."""


def divisor(value: int, limit: int = ALIGNED_BYTES) -> int:
    """The largest power of two up to ``limit`` that divides ``value``; ``limit`` for 0."""
    return limit if value == 0 else min(value & -value, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntClass:
    """What the compiler is told of one size or stride.

    ``constant`` is its value where that is part of the kernel, else None; ``divisor`` a power of two that divides it; ``wide``
    whether it needs 64 bits.
    """

    constant: int | None = None
    divisor: int = 1
    wide: bool = False

    @classmethod
    def of(cls, value: int, *, static: bool, constants: tuple[int, ...] = (), limit: int = INT32_LIMIT) -> IntClass:
        """The class of ``value``: a constant if ``static`` or one of ``constants``, else an argument with its divisor."""
        if static or value in constants:
            return cls(constant=value)
        return cls(divisor=divisor(value), wide=value >= limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandClass:
    """What the compiler is told of one operand: always three strides (batch, row, column), 0 where it is broadcast.

    ``pointer_divisor`` is the alignment of the address in bytes, ``wide`` whether offsets inside one matrix may pass 2^31 elements.
    """

    dtype: torch.dtype
    strides: tuple[IntClass, IntClass, IntClass]
    pointer_divisor: int
    wide: bool

    @classmethod
    def of(cls, layout: Layout, shape: tuple[int, int, int], *, static: bool, broadcast: bool = False) -> OperandClass:
        """The class of ``layout`` broadcast to (batch, rows, columns). ``broadcast``: it is an operand of the epilogue."""
        strides = strides_of(layout, shape)
        reach = sum((n - 1) * s for n, s in zip(shape[1:], strides[1:], strict=True))
        classes = [
            _lone_stride(s)
            if n == 1 and not broadcast and not static
            else IntClass.of(s, static=static, constants=(0, 1), limit=INT32_LIMIT if dim == 0 else STEP_LIMIT)
            for dim, (n, s) in enumerate(zip(shape, strides, strict=True))
        ]
        return cls(
            dtype=layout.dtype,
            strides=(classes[0], classes[1], classes[2]),
            pointer_divisor=divisor(layout.offset * layout.dtype.itemsize),
            wide=reach + WIDE_MARGIN >= INT32_LIMIT,
        )

    @property
    def contiguous_dim(self) -> int | None:
        """1 if elements of a column are neighbours, 2 for a row, None for neither; a row where both hold."""
        for dim in (2, 1):
            if self.strides[dim].constant == 1:
                return dim
        return None


def strides_of(layout: Layout, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Strides along (batch, row, column) of a layout broadcast to ``shape``. A stride that no index ever multiplies is 1 if it is 1
    already, else 0."""
    full = layout.expanded(shape)
    values = tuple(s if n != 1 or s == 1 else 0 for n, s in zip(full.size, full.stride, strict=True))
    return values[0], values[1], values[2]


def _lone_stride(stride: int) -> IntClass:
    """The class of a stride along a dimension of size 1: an argument that happens to be 0, so M = 1 and M = 16 share a kernel."""
    return IntClass(constant=1) if stride == 1 else IntClass(divisor=ALIGNED_BYTES)
