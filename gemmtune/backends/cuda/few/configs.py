"""A config: what is compiled, a ``Shape`` of the kernel, and what a launch is told."""

from __future__ import annotations

from dataclasses import dataclass

from ..mixed.config import MixedConfig
from ..mixed.weights import LINE_BYTES, Weights

__all__ = ["SHAPES", "Config", "Shape"]

BARRIER_BYTES = 8
HALF_BYTES = 113 * 1024
"""Of shared memory, for each of two blocks on one multiprocessor: 228 KiB less 1 KiB that the system has of each."""
SCHEDULERS, SCHEDULER_REGISTERS, MOST_REGISTERS = 4, 16384, 255
"""Of a multiprocessor, of each of them, and of a thread."""
BASE_REGISTERS = 64
EXTRA_COLS = 4
"""Between rows of sums in shared memory, so that a warp stores to all of its banks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of the kernel: ``eights`` times eight rows of a by ``cols`` columns of b, 128 bytes along K in each stage.

    ``warps_n`` warps divide the columns, and ``warps_k`` the part of K that is in a stage.
    """

    eights: int
    cols: int
    stages: int
    warps_n: int
    warps_k: int

    @property
    def threads(self) -> int:
        """Of a block: the warps that multiply, and one that copies."""
        return 32 * (self.warps_n * self.warps_k + 1)

    @property
    def tiles(self) -> int:
        """Of 16 columns, of a warp."""
        return self.cols // 16 // self.warps_n

    @property
    def sums(self) -> int:
        """Of a thread: its accumulators."""
        return 4 * self.tiles * self.eights

    def stage_bytes(self, weights: Weights) -> int:
        """Weights, rows of a, and what changes along K."""
        more = (weights.depth // x.group * self.cols * x.dtype.itemsize for x in weights.along_k)
        return LINE_BYTES * self.cols + 16 * self.eights * weights.depth + sum(-(-count // 128) * 128 for count in more)

    def shared_bytes(self, weights: Weights) -> int:
        """Of a block: stages, or in their place its sums; barriers."""
        sums_bytes = self.warps_k * 8 * self.eights * (self.cols + EXTRA_COLS) * 4
        return max(self.stages * self.stage_bytes(weights), sums_bytes) + 2 * BARRIER_BYTES * (self.stages + 1)

    @property
    def received_bytes(self) -> int:
        """More, where the blocks of a cluster divide K: sums that others send."""
        return 8 * self.eights * self.cols * 4 + 128

    def registers(self, weights: Weights) -> int:
        """Of a thread, about: sums, those of a part of K with a scale of its own, numbers on their way."""
        scaled = weights.scale is not None and weights.scale.group > 0
        return BASE_REGISTERS + self.sums * (2 if scaled else 1)

    def most_registers(self, blocks: int) -> int:
        """That a thread can have where so many blocks share a multiprocessor, whose warps four schedulers divide."""
        warps = -(-self.threads // 32 * blocks // SCHEDULERS)
        return min(SCHEDULER_REGISTERS // (32 * warps) // 8 * 8, MOST_REGISTERS)

    def resident(self, weights: Weights) -> int:
        """Blocks on a multiprocessor: with two, one of the next launch can begin while one of the last ends."""
        fits = self.shared_bytes(weights) <= HALF_BYTES and self.registers(weights) <= self.most_registers(2)
        return 2 if fits else 1

    def label(self, weights: Weights) -> str:
        """Such as ``16x128x256_s4_w2x4``: rows, columns, elements of K in a stage, stages, warps."""
        tile = f"{8 * self.eights}x{self.cols}x{weights.depth}"
        return f"{tile}_s{self.stages}_w{self.warps_n}x{self.warps_k}"


def _shape(eights: int, cols: int, stages: int, warps_n: int, warps_k: int) -> Shape:
    return Shape(eights=eights, cols=cols, stages=stages, warps_n=warps_n, warps_k=warps_k)


SHAPES: tuple[Shape, ...] = (
    _shape(1, 128, 4, 4, 2),
    _shape(1, 128, 8, 2, 4),
    _shape(1, 64, 8, 2, 4),
    _shape(1, 256, 3, 4, 2),
    _shape(2, 128, 4, 2, 2),
    _shape(2, 128, 8, 2, 4),
    _shape(2, 64, 8, 2, 4),
    _shape(2, 256, 3, 4, 2),
    _shape(4, 128, 4, 2, 2),
    _shape(4, 128, 6, 4, 2),
    _shape(4, 64, 4, 2, 4),
    _shape(4, 256, 4, 8, 1),
)
"""For up to 8, 16 and 32 rows: two blocks on a multiprocessor, or more stages; few wide tiles, or many narrow ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(MixedConfig):
    """A shape of this kernel, and what a launch is told."""

    shape: Shape
