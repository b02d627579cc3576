"""How a block of threads copies its part of an operand from memory to LDS, in CK's terms."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import Layout
from ...problem.layout import ALIGNED_BYTES

WIDE_BYTES, NARROW_BYTES = 16, 8
"""Bytes of neighbours along K that lie together in LDS (CK's K1): of operands that are contiguous along K, and of others, whose
neighbours along K come from several loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The copy of ``block`` rows of a, or columns of b, with ``depth`` elements along K.

    ``vector`` elements are loaded at a time. The threads are a grid of ``threads_k`` by ``threads_mn``; ``k1`` elements along K lie
    together in LDS. ``padded`` adds a line there after each ``k1``, since threads write across the lines.
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
        """Lines in LDS are one further apart than they are long."""
        return not self.along_k

    def elements(self, version: str) -> int:
        """Elements of one buffer in LDS; v4 has no padding."""
        lines = self.block + (self.padded and version != "v4")
        return ((self.depth // self.k1 - 1) * lines + self.block) * self.k1


def transfer(block: int, depth: int, threads: int, itemsize: int, *, along_k: bool, widest: int) -> Transfer | str:
    """The copy with the widest loads up to ``widest`` elements; or why the threads cannot divide it."""
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
    """The widest power of two of elements that one access along ``dim`` may have, at most 16 bytes.

    It divides the size along ``dim``, which CK asks for, the offset, and the distances between lines.
    """
    others = [s for i, (n, s) in enumerate(zip(layout.size, layout.stride, strict=True)) if i != dim % len(layout.size) and n > 1]
    width = ALIGNED_BYTES // layout.dtype.itemsize
    while width > 1 and any(value % width for value in (layout.size[dim], layout.offset, *others)):
        width //= 2
    return width
