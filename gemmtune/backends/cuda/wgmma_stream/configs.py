"""Shapes and configs of the persistent wgmma kernels, and the division of tiles among blocks."""

from __future__ import annotations

from dataclasses import dataclass

from ..mixed.weights import MixedConfig, Weights
from ..wgmma import configs as wgmma

ROUND_ROWS = 16
"""Rows of a 16-bit result that are reordered at a time. Float32 sums are twice as large, and half as many."""
REGISTERS = {2: (40, 232), 3: (32, 160)}
"""Registers of a copying and of a multiplying thread, by the warp groups that multiply."""
MOST_BLOCKS = 256
"""Maximum persistent blocks. More than multiprocessors would only wait."""
MOST_PARTS = 6
"""Maximum parts of a tile. Its owner adds the sums of all parts but one."""
LEAST_STEPS = 4
"""Fewest steps of a part. With fewer, exchanging sums takes longer than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(wgmma.Shape):
    """Tile and stages as in the kernel with one tile per block, with space for results next to the stages."""

    @property
    def gives_registers(self) -> bool:
        return True

    @property
    def threads(self) -> int:
        return 128 * self.warp_groups + 128

    @property
    def most_registers(self) -> int:
        return REGISTERS[self.warp_groups][1]

    def shared_bytes(self, weights: Weights, cluster_k: int = 1) -> int:  # noqa: ARG002 - no cluster divides K
        """Return the shared memory of a block: barriers, stages, and two buffers for rows of the result."""
        stages_bytes = self.stages * weights.stage_bytes(self.block_m, self.block_n, self.line_bytes)
        return wgmma.BARRIERS_BYTES + stages_bytes + 2 * ROUND_ROWS * (2 * self.block_n + wgmma.CHUNK_BYTES)


def _shape(block_m: int, warp_groups: int, line_bytes: int, stages: int) -> Shape:
    return Shape(block_m=block_m, warp_groups=warp_groups, col_tiles=1, line_bytes=line_bytes, stages=stages)


SHAPES: dict[int, tuple[Shape, ...]] = {
    8: (_shape(192, 2, 64, 5), _shape(256, 2, 64, 4)),
    4: (_shape(128, 3, 64, 4), _shape(192, 2, 64, 3), _shape(256, 2, 64, 3)),
}
"""Shapes by the bits of a weight.

Three warp groups with 192 columns leave fewer blocks idle for some sizes. Bytes are widened too slowly for them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(MixedConfig):
    """Shape plus launch parameters.

    At most ``blocks`` persistent blocks walk over the tiles. They divide tiles that do not fill all blocks along K. With ``whole``
    no tile is divided. A block then sums a tile in ``runs`` parts of K, one after another, and adds them.
    """

    shape: Shape
    blocks: int = 132
    whole: bool = False
    runs: int = 1

    def label(self, weights: Weights) -> str:
        """Return a name such as ``i4_256x128x128_s3_w2t1b4_b132_whole_pdl3``."""
        kernel, _, launch = super(Config, self).label(weights).rpartition("_k1")
        return f"{kernel}_b{self.blocks}{f'_runs{self.runs}' if self.runs > 1 else '_whole' if self.whole else ''}{launch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Division of tiles with ``steps`` of K each: every block has ``waves`` whole tiles, and ``left`` tiles have ``parts`` each."""

    steps: int
    blocks: int
    waves: int
    left: int
    parts: int

    @classmethod
    def of(cls, tiles: int, steps: int, config: Config) -> Division:
        blocks = min(config.blocks, tiles) if config.whole else config.blocks
        waves, left = divmod(tiles, blocks)
        parts = 1 if config.whole or not left else max(1, min(blocks // left, steps // LEAST_STEPS, MOST_PARTS))
        return cls(steps=steps, blocks=min(blocks, parts * tiles), waves=waves, left=left, parts=parts)

    @property
    def divided(self) -> int:
        """Number of divided tiles, which come first."""
        return self.left if self.parts > 1 else 0

    @property
    def helpers(self) -> int:
        """Blocks that sum a part for the block with the tile's first steps."""
        return self.divided * (self.parts - 1)

    def head(self, lead: float) -> int:
        """Return the first steps of a divided tile, which its owner sums: ``lead`` more than each helper."""
        return max(1, min(round((self.steps + (self.parts - 1) * lead) / self.parts), self.steps - self.parts + 1))
