"""A config: what is compiled, a ``Shape`` of the kernel, and what a launch is told."""

from __future__ import annotations

from dataclasses import dataclass

from ..mixed.config import MixedConfig
from ..mixed.source import MOST_SHARED_BYTES
from ..mixed.weights import Weights

__all__ = ["SHAPES", "SYSTEM_BYTES", "Config", "Shape"]

BARRIER_BYTES = 1024
"""Of barriers, so that stages are aligned as swizzled lines have to be."""
SYSTEM_BYTES = 1024
"""Of shared memory, that the system has of each block."""
GROUP_COLS = 64
"""Of b, that a group of four warps multiplies with one instruction."""
MANY_SUMS = 128
"""Of a thread: with more, those that copy leave it registers."""
MOST_REGISTERS, LEFT_REGISTERS = 255, 240
"""Of a thread, and where others leave it theirs."""
SCHEDULERS, SCHEDULER_REGISTERS = 4, 16384
"""Of a multiprocessor, and of each of them."""
BASE_REGISTERS = 62
"""Beside sums and what columns are scaled with and shifted by: numbers on their way, and addresses."""
BATCH = 4
"""Instructions that are asked for together, unless a shape says otherwise."""
EXTRA_COLS = 4
"""Between rows of sums in shared memory, so that a warp stores to all of its banks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of the kernel: ``rows`` of a by 64 columns of b for each of ``tiles`` of each of ``groups`` of four warps.

    A stage has ``line`` bytes of each column. ``resident`` blocks have room on a multiprocessor. ``batch``: how many times 16
    along K are asked for together; 0: as many as do well.
    """

    rows: int
    groups: int
    tiles: int
    line: int
    stages: int
    resident: int = 1
    batch: int = 0

    @property
    def cols(self) -> int:
        """Of b, in a tile."""
        return GROUP_COLS * self.groups * self.tiles

    @property
    def sums(self) -> int:
        """Of a thread: its accumulators."""
        return self.tiles * self.rows // 2

    @property
    def many_sums(self) -> bool:
        """Registers are taken from the warps that copy."""
        return 2 * self.sums > MANY_SUMS

    @property
    def threads(self) -> int:
        """Of a block: those that multiply, and a warp that copies, or four whose registers the others get."""
        return 128 * self.groups + (128 if self.many_sums else 32)

    def depth(self, weights: Weights) -> int:
        """Elements of K in a stage."""
        return self.line * 8 // weights.bits

    def batch_of(self, weights: Weights) -> int:
        """Times 16 along K that are asked for together: at most half a stage, since two batches take turns."""
        return self.batch or max(1, min(self.depth(weights) // 32, BATCH // self.tiles))

    def stage_bytes(self, weights: Weights) -> int:
        """Weights, rows of a, and what changes along K."""
        depth = self.depth(weights)
        more = (max(depth // x.group, 1) * self.cols * x.dtype.itemsize for x in weights.along_k)
        return self.line * self.cols + 2 * self.rows * depth + sum(-(-count // 128) * 128 for count in more)

    def shared_bytes(self, weights: Weights, blocks: int = 1) -> int:
        """Of a block: barriers; stages, or in their place what it finishes of a tile; and what other ``blocks`` send.

        The latter has a place of its own if there is room for it.
        """
        rows = 8 * -(-self.rows // 8 // blocks)  # that each of them finishes
        received, finishing = (blocks - 1) * rows * self.cols * 4, rows * (self.cols + EXTRA_COLS) * 4
        stages = self.stages * self.stage_bytes(weights)
        beside = BARRIER_BYTES + max(stages, finishing) + received
        return beside if beside <= self.room_bytes else BARRIER_BYTES + max(stages, finishing + received)

    @property
    def room_bytes(self) -> int:
        """Of shared memory, that a block can have."""
        return (MOST_SHARED_BYTES + SYSTEM_BYTES) // self.resident - SYSTEM_BYTES

    def registers(self, weights: Weights) -> int:
        """Of a thread that multiplies, about."""
        return BASE_REGISTERS + self.sums + 2 * self.tiles * len(weights.factors)

    @property
    def most_registers(self) -> int:
        """That such a thread can have."""
        if self.many_sums:
            return LEFT_REGISTERS
        warps = -(-self.threads // 32 * self.resident // SCHEDULERS)
        return min(SCHEDULER_REGISTERS // (32 * warps) // 8 * 8, MOST_REGISTERS)

    def label(self, weights: Weights) -> str:
        """Such as ``256x128x64_s5_w2t1b2``: rows, columns, elements of K in a stage, stages, groups, tiles of each, batch."""
        tile = f"{self.rows}x{self.cols}x{self.depth(weights)}"
        more = f"_r{self.resident}" if self.resident > 1 else ""
        return f"{tile}_s{self.stages}_w{self.groups}t{self.tiles}b{self.batch_of(weights)}{more}"


def _shape(rows: int, groups: int, tiles: int, line: int, stages: int, *, resident: int = 1, batch: int = 0) -> Shape:
    return Shape(rows=rows, groups=groups, tiles=tiles, line=line, stages=stages, resident=resident, batch=batch)


SHAPES: dict[int, tuple[Shape, ...]] = {
    8: (
        _shape(64, 1, 1, 128, 4, resident=2),
        _shape(64, 2, 1, 128, 4, batch=2),
        _shape(96, 2, 1, 128, 5),
        _shape(128, 2, 1, 128, 4),
        _shape(256, 2, 1, 64, 4),
    ),
    4: (
        _shape(64, 2, 1, 128, 4, batch=2),
        _shape(128, 2, 1, 64, 4),
        _shape(128, 2, 2, 64, 4),
        _shape(192, 2, 1, 64, 3),
    ),
}
"""By the bits of a weight: few rows, for two blocks on a multiprocessor or one, to the largest tile with room in registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(MixedConfig):
    """A shape of this kernel, and what a launch is told."""

    shape: Shape
