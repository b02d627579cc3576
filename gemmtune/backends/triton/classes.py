"""Alignment classes of integers, operands and arguments. The compiler sees a class, so one kernel serves many shapes."""

from dataclasses import dataclass

import torch

from ...problem import Layout, Problem

ALIGNED_BYTES = 16
INT32_LIMIT = 2**31
STEP_LIMIT = 2**22
"""Strides within a matrix use 64 bits from this value on, so that a step of 256 strides cannot overflow 32 bits."""
WIDE_MARGIN = 2**24
"""Headroom below 2^31 for index arithmetic of a tile that hangs over the edge of an operand."""


def divisor(value: int, limit: int = ALIGNED_BYTES) -> int:
    """Return the largest power of two up to ``limit`` that divides ``value``; ``limit`` for 0."""
    return limit if value == 0 else min(value & -value, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntClass:
    """Properties of a size or stride for the compiler: ``constant`` or None, a power-of-two ``divisor``, ``wide`` for 64 bits."""

    constant: int | None = None
    divisor: int = 1
    wide: bool = False

    @classmethod
    def of(cls, value: int, *, constants: tuple[int, ...] = (), limit: int = INT32_LIMIT) -> "IntClass":
        """Return the class of ``value``: a constant if it is one of ``constants``, else an argument with its divisor."""
        if value in constants:
            return cls(constant=value)
        return cls(divisor=divisor(value), wide=value >= limit)

    @property
    def alignment(self) -> int:
        """Power of two that divides the value, for constants and arguments alike."""
        return self.divisor if self.constant is None else divisor(self.constant)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandClass:
    """Properties of one operand that the compiler knows.

    ``strides`` always has three entries (batch, row, column), 0 for a broadcast dimension. ``pointer_divisor`` is the alignment of
    the address in bytes. ``wide`` is true if offsets inside one matrix may exceed 2^31 elements.
    """

    dtype: torch.dtype
    strides: tuple[IntClass, IntClass, IntClass]
    pointer_divisor: int
    wide: bool

    @classmethod
    def of(cls, layout: Layout, shape: tuple[int, int, int], *, broadcast: bool = False) -> "OperandClass":
        """Return the class of ``layout``, broadcast to (batch, rows, columns). ``broadcast`` marks an operand of the epilogue."""
        strides = strides_of(layout, shape)
        reach = sum((n - 1) * s for n, s in zip(shape[1:], strides[1:], strict=True))
        # A stride along a dimension of size 1 stays an argument with value 0, so that M = 1 and M = 16 share a kernel.
        classes = [
            IntClass(divisor=ALIGNED_BYTES)
            if n == 1 and s != 1 and not broadcast
            else IntClass.of(s, constants=(0, 1), limit=INT32_LIMIT if dim == 0 else STEP_LIMIT)
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
        """Dimension of stride 1: 1 within a column, 2 within a row, None for neither. A row wins if both hold."""
        return next((dim for dim in (2, 1) if self.strides[dim].constant == 1), None)

    def vector_bytes(self, mask_alignment: int) -> int:
        """Return the widest legal access along the contiguous dimension, in bytes, for mask bounds of ``mask_alignment``."""
        itemsize, dim = self.dtype.itemsize, self.contiguous_dim
        if dim is None:
            return itemsize
        others = (stride.alignment * itemsize for i, stride in enumerate(self.strides) if i != dim)
        return max(min(self.pointer_divisor, mask_alignment * itemsize, *others), itemsize)


def strides_of(layout: Layout, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the strides (batch, row, column) of a layout broadcast to ``shape``, 0 (or still 1) where no index multiplies."""
    full = layout.expanded(shape)
    values = tuple(s if n != 1 or s == 1 else 0 for n, s in zip(full.size, full.stride, strict=True))
    return values[0], values[1], values[2]


def shaped(problem: Problem) -> dict[str, tuple[Layout, tuple[int, int, int]]]:
    """Return each matrix by name: its layout and the (batch, rows, columns) that it is broadcast to."""
    out = (problem.batch, problem.m, problem.n)
    matrices = problem.groups if problem.groups and len(problem.b.size) == 3 else problem.batch
    layouts = {
        "a": (problem.a, (problem.batch, problem.a.size[-2], problem.k)),
        "b": (problem.b, (matrices, problem.b.size[-2], problem.b.size[-1])),
        # Rows that are added up are first written to a workspace.
        "out": (problem.out if problem.weights is None else Layout.contiguous((problem.m, problem.n), problem.dtype), out),
    }
    if problem.c is not None and problem.d is not None:
        layouts["c"] = (problem.c, (1, problem.m, problem.k2))
        layouts["d"] = (problem.d, (1, problem.k2, problem.n))
    if problem.inp is not None:
        layouts["inp"] = (problem.inp, out)
    for i, layout in enumerate(problem.epilogue.operands if problem.epilogue else ()):
        layouts[f"x{i}"] = (layout, out)
    return layouts


SIGNATURE_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.float8_e4m3fnuz: "fp8e4b8", torch.float8_e5m2fnuz: "fp8e5b16",
}  # fmt: skip
"""Name of each torch dtype in a kernel signature."""
