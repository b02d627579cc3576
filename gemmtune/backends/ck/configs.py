"""Config: an instance with all compile-time decisions that a problem's layouts and sizes require."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ...problem import Layout
from .instances import Instance
from .pipeline import LDS_BUFFERS, Path
from .transfer import Transfer

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
        """LDS bytes of the part."""
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
        """Config's part of a choice's name."""
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
