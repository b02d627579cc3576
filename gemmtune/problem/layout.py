"""The layout of one operand in memory: size, stride, offset and dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import InvalidProblemError
from .dtypes import dtype_name

ALIGNED_BYTES = 16
"""The widest vector access of a CUDA thread (128 bits) and the alignment that TMA requires. More alignment gains nothing."""

COLUMN_ROLES = ("b", "d")
"""Right operands of products. A single column of them is column-major, as the weight of a Linear with one output is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Size, stride, storage offset (all in elements) and dtype of one operand.

    ``offset`` counts from a 16-byte boundary. ``of`` reduces it modulo 16 bytes, because nothing beyond that changes which kernels
    are legal or fast. Views at different places of one buffer are therefore the same problem.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    def __post_init__(self) -> None:
        if len(self.size) != len(self.stride):
            raise InvalidProblemError(
                f"layout: got {len(self.size)} sizes {self.size} and {len(self.stride)} strides {self.stride}"
            )
        if any(v < 0 for v in (*self.size, *self.stride, self.offset)):
            raise InvalidProblemError(f"layout: sizes, strides and offset must be 0 or more, got {self}")

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Return the layout of a tensor, with the offset computed from its data pointer."""
        offset = tensor.data_ptr() % ALIGNED_BYTES // tensor.element_size()
        return cls(size=tuple(tensor.shape), stride=tensor.stride(), dtype=tensor.dtype, offset=offset)

    @classmethod
    def contiguous(cls, size: Sequence[int], dtype: torch.dtype) -> Layout:
        """Return the row-major layout without padding."""
        stride = [1] * len(size)
        for i in range(len(size) - 2, -1, -1):
            stride[i] = stride[i + 1] * max(size[i + 1], 1)
        return cls(size=tuple(size), stride=tuple(stride), dtype=dtype)

    def settled(self, *, columns: bool = False) -> Layout:
        """Return this layout with one fixed stride for each dimension of size 1, whose stride no element depends on.

        A single row or matrix gets the stride of a dense operand. A single column gets 1, or with ``columns``, if its elements are
        adjacent, that of a column-major matrix.
        """
        if 1 not in self.size:
            return self
        stride = settled_stride(self.size, self.stride, columns=columns)
        return self if stride == self.stride else Layout(size=self.size, stride=stride, dtype=self.dtype, offset=self.offset)

    @property
    def transposed(self) -> Layout:
        """The layout of the same memory with the last two dimensions exchanged."""
        size = (*self.size[:-2], self.size[-1], self.size[-2])
        stride = (*self.stride[:-2], self.stride[-1], self.stride[-2])
        return Layout(size=size, stride=stride, dtype=self.dtype, offset=self.offset)

    def expanded(self, size: Sequence[int]) -> Layout:
        """Return this layout broadcast to ``size``, with stride 0 along repeats. Raises InvalidProblemError if it does not fit."""
        missing = len(size) - len(self.size)
        old_size, old_stride = (1,) * missing + self.size, (0,) * missing + self.stride
        if missing < 0 or any(o not in (1, n) for o, n in zip(old_size, size, strict=True)):
            raise InvalidProblemError(f"got an operand of shape {self.size}, expected one that broadcasts to {tuple(size)}")
        stride = tuple(0 if o == 1 and n != 1 else s for o, s, n in zip(old_size, old_stride, size, strict=True))
        return Layout(size=tuple(size), stride=stride, dtype=self.dtype, offset=self.offset)

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def span(self) -> int:
        """Elements from the first to just past the last one in memory; 0 if there are none."""
        return 0 if self.numel == 0 else 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    @property
    def contiguous_dims(self) -> tuple[int, ...]:
        """The dimensions of stride 1: usually one, more if a dimension has size 1, none for a strided view."""
        return tuple(i for i, s in enumerate(self.stride) if s == 1)

    @property
    def row_major(self) -> bool:
        """True if the elements of a row are adjacent in memory and rows do not overlap."""
        return self.stride[-1] == 1 and (self.size[-2] <= 1 or self.stride[-2] >= self.size[-1])

    @property
    def column_major(self) -> bool:
        """True if the elements of a column are adjacent in memory and columns do not overlap."""
        return self.transposed.row_major

    @property
    def alignment(self) -> int:
        """The widest aligned vector access in elements, at most 16 bytes.

        It is the largest power of two that divides the size of the contiguous dimension (stride 1), the offset and every other
        stride. Without a contiguous dimension it is 1. With several, the best one counts. PyTorch Inductor's CUTLASS backend uses
        the same rule.
        """
        widest = 1
        for dim in self.contiguous_dims:
            others = [s for i, s in enumerate(self.stride) if i != dim]
            width = ALIGNED_BYTES // self.dtype.itemsize
            while width > 1 and any(v % width for v in (self.size[dim], self.offset, *others)):
                width //= 2
            widest = max(widest, width)
        return widest

    def __str__(self) -> str:
        size = "x".join(map(str, self.size)) or "scalar"
        text = f"{dtype_name(self.dtype)}[{size}]({','.join(map(str, self.stride))})"
        return f"{text}+{self.offset}" if self.offset else text


def settled_stride(size: Sequence[int], stride: Sequence[int], *, columns: bool = False) -> tuple[int, ...]:
    """Return the strides of ``Layout.settled``."""
    settled, reach = list(stride), 1
    for dim in reversed(range(len(size))):
        if size[dim] == 1:
            settled[dim] = reach
        reach = max(reach, settled[dim] * size[dim])
    if columns and len(size) > 1 and size[-1] == 1 and stride[-2] == 1 and size[-2] > 1:
        settled[-1] = size[-2]
    return tuple(settled)
