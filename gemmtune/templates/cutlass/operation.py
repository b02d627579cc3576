"""An operation of CUTLASS's library as a value: element types, layouts, tile, schedule. Its name is CUTLASS's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ELEMENTS", "Operation"]

ELEMENTS: dict[str, torch.dtype] = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "f32": torch.float32,
    "f64": torch.float64,
    "s8": torch.int8,
    "s32": torch.int32,
}
"""CUTLASS's names of element types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """d[M, N] = a[M, K] @ b[K, N] with an epilogue, compiled for one tile.

    Layouts are CUTLASS's letters: ``t`` row-major, ``n`` column-major. Alignments are in elements. ``modern`` operations are
    CUTLASS 3.x (SM90 and later), the others 2.x; ``introduced`` is the compute capability that an operation needs.
    """

    name: str
    modern: bool
    introduced: int
    a: str
    b: str
    c: str
    d: str
    accumulator: str
    layout_a: str
    layout_b: str
    layout_d: str
    alignment_a: int
    alignment_b: int
    alignment_d: int
    tile: tuple[int, int, int]
    cluster: tuple[int, int, int]
    stages: int
    warps: tuple[int, int, int]
    instruction: tuple[int, int, int]
    opcode: str
    math: str
    kernel_schedule: str
    epilogue_schedule: str
    scheduler: str

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Operation:
        """An operation out of a mapping that ``listing.py`` printed."""
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
        return cls(**values)

    @property
    def stream_k(self) -> bool:
        """Tiles are divided among multiprocessors along K as well."""
        return self.scheduler == "StreamK"

    @property
    def transposes(self) -> bool:
        """The kernel computes d^T = b^T @ a^T with the tile as it is: those of CUTLASS 2.x store rows."""
        return not self.modern and self.layout_d == "n"

    @property
    def cooperative(self) -> bool:
        """Two consumer warp groups share a tile; in the ``pingpong`` schedule each has its own."""
        return "Cooperative" in self.kernel_schedule

    @property
    def tma_store(self) -> bool:
        """The epilogue writes through shared memory and TMA, and can be an epilogue visitor tree."""
        return self.modern and "NoSmem" not in self.epilogue_schedule

    @property
    def mainloop_bytes(self) -> int:
        """Shared memory of the stages of a and b; 0 for 3.x operations, which have as many stages as fit."""
        sizes = self.tile[0] * ELEMENTS[self.a].itemsize + self.tile[1] * ELEMENTS[self.b].itemsize
        return 0 if self.modern else self.stages * self.tile[2] * sizes

    @property
    def accumulators_per_thread(self) -> int:
        """32-bit registers that hold the sums."""
        threads = (256 if self.cooperative else 128) if self.modern else 32 * self.warps[0] * self.warps[1] * self.warps[2]
        return self.tile[0] * self.tile[1] * ELEMENTS[self.accumulator].itemsize // 4 // threads
