"""A config: what is compiled, a ``Shape`` of the kernel, and what a launch is told."""

from __future__ import annotations

from dataclasses import dataclass

from ..hopper import BARRIER_BYTES, HALF_SMEM_BYTES, LINE_BYTES, registers_per_thread
from ..mixed.weights import MixedConfig, Weights

__all__ = ["SHAPES", "Config", "Shape"]

BASE_REGISTERS = 64
"""What a thread needs beside sums: numbers on their way, and addresses."""
EXTRA_COLS = 4
"""Columns between rows of sums in shared memory, so that a warp stores to all of its banks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tile of ``block_m`` rows of a by ``block_n`` columns of b, with 128 bytes of each column in each of ``stages``.

    ``warps_n`` warps divide the columns, and ``warps_k`` the part of K that is in a stage.
    """

    block_m: int
    block_n: int
    stages: int
    warps_n: int
    warps_k: int

    @property
    def threads(self) -> int:
        """The threads of a block, the copying warp included."""
        return 32 * (self.warps_n * self.warps_k + 1)

    @property
    def col_tiles(self) -> int:
        """The products of 16 columns that a warp has beside each other."""
        return self.block_n // 16 // self.warps_n

    @property
    def sums(self) -> int:
        """The accumulators of a thread."""
        return self.col_tiles * self.block_m // 2

    @property
    def line_bytes(self) -> int:
        """What a stage has of each column."""
        return LINE_BYTES

    def block_k(self, weights: Weights) -> int:
        """Elements of K in a stage."""
        return weights.block_k()

    def shared_bytes(self, weights: Weights, cluster_k: int = 1) -> int:
        """The shared memory of a block: stages, or in their place its sums; barriers; sums that other blocks send."""
        sums_bytes = self.warps_k * self.block_m * (self.block_n + EXTRA_COLS) * 4
        received_bytes = self.block_m * self.block_n * 4 + 128 if cluster_k > 1 else 0
        return (
            max(self.stages * weights.stage_bytes(self.block_m, self.block_n), sums_bytes)
            + 2 * BARRIER_BYTES * (self.stages + 1)
            + received_bytes
        )

    def registers(self, weights: Weights) -> int:
        """About what a thread needs: sums, those of a part of K with a scale of its own, numbers on their way."""
        scaled = weights.scale is not None and weights.scale.group > 0
        return BASE_REGISTERS + self.sums * (2 if scaled else 1)

    def blocks_per_sm(self, weights: Weights) -> int:
        """Blocks on a multiprocessor: with two, one of the next launch can begin while one of the last ends."""
        fits = self.shared_bytes(weights) <= HALF_SMEM_BYTES and self.registers(weights) <= registers_per_thread(self.threads, 2)
        return 2 if fits else 1

    def label(self, weights: Weights) -> str:
        """A name such as ``16x128x256_s4_w2x4``: rows, columns, elements of K in a stage, stages, warps."""
        return f"{self.block_m}x{self.block_n}x{weights.block_k()}_s{self.stages}_w{self.warps_n}x{self.warps_k}"


SHAPES: tuple[Shape, ...] = tuple(
    Shape(block_m=block_m, block_n=block_n, stages=stages, warps_n=warps_n, warps_k=warps_k)
    for block_m, block_n, stages, warps_n, warps_k in (
        (8, 128, 4, 4, 2),
        (8, 128, 8, 2, 4),
        (8, 64, 8, 2, 4),
        (8, 256, 3, 4, 2),
        (16, 128, 4, 2, 2),
        (16, 128, 8, 2, 4),
        (16, 64, 8, 2, 4),
        (16, 256, 3, 4, 2),
        (32, 128, 4, 2, 2),
        (32, 128, 6, 4, 2),
        (32, 64, 4, 2, 4),
        (32, 256, 4, 8, 1),
    )
)
"""For up to 8, 16 and 32 rows: two blocks on a multiprocessor, or more stages; few wide tiles, or many narrow ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(MixedConfig):
    """A shape of this kernel, and what a launch is told."""

    shape: Shape
