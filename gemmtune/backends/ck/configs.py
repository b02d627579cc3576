"""Config: an instance with all compile-time decisions that a problem's layouts and sizes require."""

from dataclasses import dataclass
from typing import Literal

import torch

from ...problem import Layout
from ...problem.layout import ALIGNED_BYTES
from .instances import WAVE, Instance

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


PREFETCHED = {"v1": 1, "v3": 2, "v4": 3, "v5": 3}
"""Steps whose loads are in flight before the loop. For v2 the number depends on the tile."""
LDS_BUFFERS = {"v4": 2}
"""LDS buffers of a step, for pipelines with several."""
UNROLLED = 2
"""Steps in one iteration of the loop of v4 and v5."""
IN_FLIGHT_BYTES = 32768
"""Bytes that v2 keeps in flight for each compute unit."""
MOST_IN_FLIGHT = 8
SIMDS = 4
"""SIMD units of a compute unit."""
NUMBERS = ("Full", "One", "Two", "Three", "Four", "Five", "Six", "Seven")
"""CK's names for the steps that remain after whole iterations of the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Decisions of CK's host code by number of steps: is there a loop, and how many steps follow. ``steps`` is the least one."""

    loop: bool
    tail: str
    steps: int


def prefetched(instance: Instance) -> int:
    """Return the steps whose loads are in flight before the loop begins."""
    if instance.version != "v2":
        return PREFETCHED[instance.version]
    blocks = max(SIMDS * WAVE // instance.threads, 1)
    step_bytes = (instance.block_m + instance.block_n) * instance.bytes_k
    return min(max(-(-(IN_FLIGHT_BYTES // blocks) // step_bytes), 2), MOST_IN_FLIGHT)


def why_too_short(instance: Instance, steps: int) -> str | None:
    """Return why a pipeline cannot serve a sum of ``steps`` steps, or None."""
    least = 1 if instance.version == "v1" else prefetched(instance) + 1
    if steps < least:
        return f"pipeline {instance.version} prefetches {prefetched(instance)} steps: needs at least {least} along K"
    return None


def path_of(instance: Instance, steps: int) -> Path:
    """Return the kernel's path for ``steps`` steps, which ``why_too_short`` must accept."""
    ahead = prefetched(instance)
    loop = steps > ahead
    if instance.version in ("v1", "v3"):
        return Path(loop=loop, tail="Full", steps=ahead + 1 if loop else 1)
    if instance.version == "v2":
        return Path(loop=loop, tail=NUMBERS[steps % ahead], steps=ahead + (steps % ahead or ahead))
    odd = steps % UNROLLED == 1
    return Path(loop=loop, tail="Odd" if odd else "Even", steps=ahead + 1 + ((ahead + 1) % UNROLLED != odd))


SUM_BYTES = 4
"""Bytes of a sum, which CK passes through LDS as float32 for the epilogue."""
Kind = Literal["row", "col", "one"]
"""Access of a kernel to an operand other than a and b: contiguous rows, contiguous columns, or a single number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Operand other than a and b, broadcast to the result. ``stride`` is between its rows, or its columns."""

    kind: Kind
    dtype: torch.dtype
    stride: int
    batch_stride: int
    vector: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Path from sums to the result: the part that waves exchange through LDS at a time, and the threads that store it."""

    part_m: int
    part_n: int
    threads_m: int
    threads_n: int
    vector: int

    @property
    def lds_bytes(self) -> int:
        return self.part_m * self.part_n * SUM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One kernel of CK.

    ``padding`` names the sizes that need not be multiples of the tile (CK's GemmSpecialization). With ``split_k`` a block sums a
    part of K. The last block of a tile adds the parts up in their order. ``changed`` is true if numbers are converted on the way to
    LDS.
    """

    instance: Instance
    swap_ab: bool
    itemsize: int
    a: Transfer
    b: Transfer
    store: Store
    padding: str
    path: Path
    split_k: int = 1
    changed: bool = False

    @property
    def lds_bytes(self) -> int:
        """LDS bytes of a block, which the source asserts."""
        version = self.instance.version
        k1 = max(self.a.k1, self.b.k1)
        operands = sum(-(-x.elements(version) // k1) * k1 for x in (self.a, self.b)) * self.itemsize
        # A buffer holds a step of both operands, and later a part of the sums.
        return LDS_BUFFERS.get(version, 1) * max(operands, self.store.lds_bytes)

    @property
    def label(self) -> str:
        vectors = f"a{self.a.vector}b{self.b.vector}c{self.store.vector}"
        layouts = "".join("k" if x.along_k else name for x, name in ((self.a, "m"), (self.b, "n")))
        path = f"{self.path.tail.lower()}{'' if self.path.loop else '_short'}"
        text = f"{layouts}_{self.instance.label(self.itemsize)}_{vectors}_{self.padding.lower()}_{path}"
        return text + f"_k{self.split_k}" * (self.split_k > 1) + "_swap" * self.swap_ab


def store_of(instance: Instance, widest: int) -> Store:
    """Return the path of the sums: one instruction result per wave at a time, in stores of at most ``widest`` elements."""
    part_m, part_n = instance.mfma * instance.waves[0], instance.mfma * instance.waves[1]
    vector = min(widest, part_m * part_n // instance.threads)
    threads_n = min(part_n // vector, instance.threads)
    return Store(part_m=part_m, part_n=part_n, threads_m=instance.threads // threads_n, threads_n=threads_n, vector=vector)


def read_of(layout: Layout, vector: int) -> Read | None:
    """Return the access to an operand broadcast to the result, or None if neither rows nor columns are contiguous."""
    rows, cols = layout.size[-2:]
    down, along = layout.stride[-2] if rows > 1 else 0, layout.stride[-1] if cols > 1 else 1
    batch = layout.stride[0] if len(layout.size) == 3 and layout.size[0] > 1 else 0
    if down == 0 and (along == 0 or (rows == cols == 1)):
        return Read(kind="one", dtype=layout.dtype, stride=0, batch_stride=batch, vector=1)
    if along == 1:
        return Read(kind="row", dtype=layout.dtype, stride=down, batch_stride=batch, vector=vector)
    if down == 1 or rows == 1:
        return Read(kind="col", dtype=layout.dtype, stride=along, batch_stride=batch, vector=1)
    return None
