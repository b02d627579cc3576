"""Shapes of the kernels for more rows times weights, and configs: a shape, and what a launch is told."""

from __future__ import annotations

from dataclasses import dataclass

from ..hopper import SMEM_BYTES, SYSTEM_BYTES, WGMMA_M, registers_per_thread
from ..mixed.weights import MixedConfig, Weights

BARRIERS_BYTES = 1024
"""What barriers have room in, so that stages are aligned as swizzled lines have to be."""
MANY_SUMS = 64
"""The sums in a thread beyond which the copying warps leave it registers."""
LEFT_REGISTERS = 240
"""The registers of a thread to which others leave theirs."""
BASE_REGISTERS = 62
"""What a thread needs beside sums and what columns are scaled with and shifted by: numbers on their way, and addresses."""
K16_BATCH = 4
"""Instructions that are asked for together, unless a shape says otherwise."""
EXTRA_COLS = 4
"""Columns between rows of sums in shared memory, so that a warp stores to all of its banks."""
CHUNK_BYTES = 16
"""What a thread stores at once: elements of the result, or before an epilogue float32 sums."""
CLUSTER_SIZES = (1, 2, 3, 4)
"""The blocks of a cluster that divide K: more would add up longer than they multiply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tile of ``block_m`` rows of a by 64 columns of b for each of ``col_tiles`` of each of ``warp_groups``.

    A stage has ``line_bytes`` of each column. ``blocks_per_sm`` have room on a multiprocessor. ``k16_batch``: how many times 16
    along K are asked for together; 0: as many as do well.
    """

    block_m: int
    warp_groups: int
    col_tiles: int
    line_bytes: int
    stages: int
    blocks_per_sm: int = 1
    k16_batch: int = 0

    @property
    def block_n(self) -> int:
        """The columns of b in a tile."""
        return WGMMA_M * self.warp_groups * self.col_tiles

    @property
    def sums(self) -> int:
        """The accumulators of a thread."""
        return self.col_tiles * self.block_m // 2

    @property
    def gives_registers(self) -> bool:
        """Registers are taken from the warps that copy."""
        return self.sums > MANY_SUMS

    @property
    def threads(self) -> int:
        """The threads of a block: those that multiply, and a warp that copies, or four whose registers the others get."""
        return 128 * self.warp_groups + (128 if self.gives_registers else 32)

    def block_k(self, weights: Weights) -> int:
        """Elements of K in a stage."""
        return weights.block_k(self.line_bytes)

    def k16_batch_of(self, weights: Weights) -> int:
        """Times 16 along K that are asked for together: at most half a stage, since two batches take turns."""
        return self.k16_batch or max(1, min(self.block_k(weights) // 32, K16_BATCH // self.col_tiles))

    @property
    def room_bytes(self) -> int:
        """The shared memory that a block can have."""
        return (SMEM_BYTES + SYSTEM_BYTES) // self.blocks_per_sm - SYSTEM_BYTES

    def received_bytes(self, cluster_k: int) -> int:
        """The sums that a block is sent by the others of its cluster."""
        return (cluster_k - 1) * self._finished_rows(cluster_k) * self.block_n * 4

    def receives_beside(self, weights: Weights, cluster_k: int) -> bool:
        """What others send has a place of its own beside the stages, rather than in their place."""
        beside = BARRIERS_BYTES + self._tile_bytes(weights, cluster_k) + self.received_bytes(cluster_k)
        return beside <= self.room_bytes

    def shared_bytes(self, weights: Weights, cluster_k: int = 1) -> int:
        """The shared memory of a block: barriers; stages, or in their place what it finishes of a tile; and what others send."""
        received = self.received_bytes(cluster_k)
        if self.receives_beside(weights, cluster_k):
            return BARRIERS_BYTES + self._tile_bytes(weights, cluster_k) + received
        return BARRIERS_BYTES + max(self._stages_bytes(weights), self._finished_bytes(cluster_k) + received)

    def _finished_rows(self, cluster_k: int) -> int:
        """The rows of a tile that each block of the cluster finishes."""
        return 8 * -(-self.block_m // 8 // cluster_k)

    def _stages_bytes(self, weights: Weights) -> int:
        return self.stages * weights.stage_bytes(self.block_m, self.block_n, self.line_bytes)

    def _finished_bytes(self, cluster_k: int) -> int:
        return self._finished_rows(cluster_k) * (self.block_n + EXTRA_COLS) * 4

    def _tile_bytes(self, weights: Weights, cluster_k: int) -> int:
        return max(self._stages_bytes(weights), self._finished_bytes(cluster_k))

    def registers(self, weights: Weights) -> int:
        """About what a thread that multiplies needs."""
        return BASE_REGISTERS + self.sums + 2 * self.col_tiles * len(weights.factors)

    @property
    def most_registers(self) -> int:
        """What such a thread can have."""
        return LEFT_REGISTERS if self.gives_registers else registers_per_thread(self.threads, self.blocks_per_sm)

    def label(self, weights: Weights) -> str:
        """A name such as ``256x128x64_s5_w2t1b2``: rows, columns, K of a stage, stages, warp groups, tiles of each, batch."""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k(weights)}"
        more = f"_r{self.blocks_per_sm}" if self.blocks_per_sm > 1 else ""
        return f"{tile}_s{self.stages}_w{self.warp_groups}t{self.col_tiles}b{self.k16_batch_of(weights)}{more}"


SHAPES: dict[int, tuple[Shape, ...]] = {
    8: (
        Shape(block_m=64, warp_groups=1, col_tiles=1, line_bytes=128, stages=4, blocks_per_sm=2),
        Shape(block_m=64, warp_groups=2, col_tiles=1, line_bytes=128, stages=4, k16_batch=2),
        Shape(block_m=96, warp_groups=2, col_tiles=1, line_bytes=128, stages=5),
        Shape(block_m=128, warp_groups=2, col_tiles=1, line_bytes=128, stages=4),
        Shape(block_m=256, warp_groups=2, col_tiles=1, line_bytes=64, stages=4),
    ),
    4: (
        Shape(block_m=64, warp_groups=2, col_tiles=1, line_bytes=128, stages=4, k16_batch=2),
        Shape(block_m=128, warp_groups=2, col_tiles=1, line_bytes=64, stages=4),
        Shape(block_m=128, warp_groups=2, col_tiles=2, line_bytes=64, stages=4),
        Shape(block_m=192, warp_groups=2, col_tiles=1, line_bytes=64, stages=3),
    ),
}
"""The shapes by the bits of a weight: few rows, for two blocks on a multiprocessor or one, to the largest tile with room in
registers."""
SHAPES_FOR_GROUPS = {
    8: (*SHAPES[8], Shape(block_m=144, warp_groups=2, col_tiles=1, line_bytes=128, stages=4)),
    4: (*SHAPES[4], Shape(block_m=144, warp_groups=2, col_tiles=1, line_bytes=64, stages=4)),
}
"""Also tiles for groups of about 128 or 256 rows, half of which have a few more: one or two such tiles have room for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(MixedConfig):
    """A shape of this kernel, and what a launch is told."""

    shape: Shape
