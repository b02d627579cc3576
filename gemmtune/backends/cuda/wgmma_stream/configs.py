"""Shapes and configs of the persistent wgmma kernels, and the division of tiles among blocks."""

from __future__ import annotations

from dataclasses import dataclass

from ..hopper import LEFT_REGISTERS, registers_per_thread
from ..mixed.weights import MixedConfig, Weights
from ..wgmma import configs as wgmma

ROUND_ROWS = 16
"""Rows of a 16-bit result that are reordered at a time. Float32 sums are twice as large, and half as many."""
LEAST_STEPS = 2
"""Fewest steps of a tile that a block sums for another: exchanging sums takes longer than one or two steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(wgmma.Shape):
    """Tile and stages as in the kernel with one tile per block, with space for results next to the stages."""

    @property
    def most_registers(self) -> int:
        """Maximum registers of a multiplying thread."""
        return LEFT_REGISTERS if self.gives_registers else registers_per_thread(self.threads, 1)

    def shared_bytes(self, weights: Weights, cluster_k: int = 1) -> int:  # noqa: ARG002 - no cluster divides K
        """Return the shared memory of a block: barriers, stages, and two buffers for rows of the result."""
        stages_bytes = self.stages * weights.stage_bytes(self.block_m, self.block_n, self.line_bytes)
        return wgmma.BARRIERS_BYTES + stages_bytes + 2 * ROUND_ROWS * (2 * self.block_n + wgmma.CHUNK_BYTES)


def _shape(block_m: int, line_bytes: int, stages: int, col_tiles: int = 1) -> Shape:
    return Shape(block_m=block_m, warp_groups=2, col_tiles=col_tiles, line_bytes=line_bytes, stages=stages)


SHAPES: dict[int, tuple[Shape, ...]] = {
    8: (_shape(128, 128, 4), _shape(192, 64, 5), _shape(256, 64, 4)),
    4: (_shape(128, 64, 5), _shape(192, 64, 3), _shape(256, 64, 3)),
}
"""Shapes by the bits of a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(MixedConfig):
    """Shape plus launch parameters.

    At most ``blocks`` persistent blocks walk over the tiles. They divide the tiles that do not fill all blocks along K, and as many
    more as there are blocks. With ``whole`` no tile is divided.
    """

    shape: Shape
    blocks: int = 132
    whole: bool = False

    def label(self, weights: Weights) -> str:
        """Return a name such as ``i4_256x128x128_s3_w2t1b4_b132_whole_pdl3``."""
        kernel, _, launch = super(Config, self).label(weights).rpartition("_k1")
        return f"{kernel}_b{self.blocks}{'_whole' if self.whole else ''}{launch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Division of ``tiles`` with ``steps`` of K each: the first ``divided`` of them are divided evenly among ``blocks`` blocks."""

    tiles: int
    steps: int
    blocks: int
    divided: int

    @classmethod
    def of(cls, tiles: int, steps: int, config: Config) -> Division:
        """Return the division of a launch. No block has fewer than ``LEAST_STEPS`` steps, and none is without a tile."""
        if config.whole:
            return cls(tiles=tiles, steps=steps, blocks=min(config.blocks, tiles), divided=0)
        blocks = max(1, min(config.blocks, tiles * steps // LEAST_STEPS))
        left = tiles % blocks
        divided = min(tiles, left + blocks) if left else 0
        return cls(tiles=tiles, steps=steps, blocks=blocks, divided=divided)

    @property
    def each(self) -> int:
        """Steps of the divided tiles that each block sums; some blocks sum one more."""
        return self.divided * self.steps // self.blocks

    @property
    def more(self) -> int:
        """Blocks that sum one more."""
        return self.divided * self.steps % self.blocks

    @property
    def splits(self) -> int:
        """Maximum number of blocks that sum one tile."""
        return min(self.steps, (self.steps - 2) // self.each + 2) if self.divided else 1

    @property
    def block_steps(self) -> float:
        """Steps of the block with the most work."""
        waves = -(-(self.tiles - self.divided) // self.blocks)
        return waves * self.steps + self.divided * self.steps / self.blocks
