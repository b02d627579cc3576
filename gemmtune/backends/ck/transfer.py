"""Copy of an operand's part from memory to LDS by a block of threads, in CK's terms."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import Layout
from ...problem.layout import ALIGNED_BYTES

WIDE_BYTES, NARROW_BYTES = 16, 8
"""Bytes along K stored together in LDS (CK's K1), for operands contiguous along K and for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Copy of ``block`` rows of a, or columns of b, with ``depth`` elements along K.

    Each load has ``vector`` elements. The threads form a grid of ``threads_k`` by ``threads_mn``. LDS stores ``k1`` elements along
    K together. With ``padded`` an extra line follows each ``k1``, because threads write across the lines.
    """

    along_k: bool
    block: int
    depth: int
    k1: int
    vector: int
    threads_k: int
    threads_mn: int

    @property
    def padded(self) -> bool:
        """True if LDS pads each line by one."""
        return not self.along_k

    def elements(self, version: str) -> int:
        """Return the elements of one buffer in LDS; v4 has no padding."""
        lines = self.block + (self.padded and version != "v4")
        return ((self.depth // self.k1 - 1) * lines + self.block) * self.k1


def transfer(block: int, depth: int, threads: int, itemsize: int, *, along_k: bool, widest: int) -> Transfer | str:
    """Return the copy with the widest loads up to ``widest`` elements, or why the threads cannot divide it."""
    k1 = min((WIDE_BYTES if along_k else NARROW_BYTES) // itemsize, depth)
    columns = depth // k1
    if along_k:
        threads_k = min(columns, threads)
        threads_mn = min(threads // threads_k, block)
        vector = min(widest, k1)
    else:
        vector = min(widest, max(block * depth // (threads * k1), 1))
        threads_mn = min(block // vector, threads)
        threads_k = min(threads // threads_mn, columns)
    if depth % k1 or columns % threads_k or block % threads_mn or (not along_k and block // threads_mn % vector):
        return f"{threads} threads cannot divide a part of {block} by {depth} elements evenly"
    return Transfer(along_k=along_k, block=block, depth=depth, k1=k1, vector=vector, threads_k=threads_k, threads_mn=threads_mn)


def vector_along(layout: Layout, dim: int) -> int:
    """Return the widest access along ``dim``, in elements: at most 16 bytes, and a divisor of size, offset and line distances."""
    others = [s for i, (n, s) in enumerate(zip(layout.size, layout.stride, strict=True)) if i != dim % len(layout.size) and n > 1]
    width = ALIGNED_BYTES // layout.dtype.itemsize
    while width > 1 and any(value % width for value in (layout.size[dim], layout.offset, *others)):
        width //= 2
    return width
