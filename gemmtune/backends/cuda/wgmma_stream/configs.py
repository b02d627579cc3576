"""Shapes and configs of the persistent wgmma kernels, and the division of tiles among blocks."""

from __future__ import annotations

from dataclasses import dataclass

from ..hopper import LINE_BYTES, WGMMA_M
from ..mixed.weights import MixedConfig, Weights
from ..wgmma.configs import BARRIERS_BYTES, CHUNK_BYTES

ROUND_ROWS = 16
"""Rows of a 16-bit result that are reordered at a time. Float32 sums are twice as large, and half as many."""
REGISTERS = {2: (88, 208), 3: (88, 136)}
"""Registers of a thread that copies or widens, and of a multiplying one, by the warp groups that multiply."""
MOST_ROWS = {2: 256, 3: 192}
"""Most rows of a tile whose sums fit in registers, by the warp groups that multiply."""
WIDE = 3
"""Steps of widened weights in shared memory."""
BLOCK_K = LINE_BYTES // 2
"""Elements of K in a step: a swizzled line of widened weights."""
MOST_PARTS = 6
"""Maximum parts of a tile. Its owner adds the sums of all parts but one."""
LEAST_STEPS = 4
"""Fewest steps of a part. With fewer, exchanging sums takes longer than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tile of ``block_m`` rows of a by 64 columns of b for each of ``warp_groups``, with ``stages`` of BLOCK_K.

    A stage has ``line_bytes`` of each column.
    """

    block_m: int
    warp_groups: int
    line_bytes: int
    stages: int

    @property
    def block_n(self) -> int:
        """Columns of b in a tile."""
        return WGMMA_M * self.warp_groups

    @property
    def threads(self) -> int:
        """Threads of one block: those that multiply, and a warp group that copies and widens weights."""
        return 128 * self.warp_groups + 128

    def block_k(self, weights: Weights) -> int:
        """Return the elements of K in a stage."""
        return weights.block_k(self.line_bytes)

    def shared_bytes(self, weights: Weights, cluster_k: int = 1) -> int:  # noqa: ARG002 - no cluster divides K
        """Return the shared memory of a block: barriers, stages, widened weights, and two buffers for rows of the result."""
        stages_bytes = self.stages * weights.stage_bytes(self.block_m, self.block_n, self.line_bytes)
        wide_bytes = WIDE * self.block_n * LINE_BYTES
        return BARRIERS_BYTES + stages_bytes + wide_bytes + 2 * ROUND_ROWS * (2 * self.block_n + CHUNK_BYTES)

    def label(self, weights: Weights) -> str:
        """Return a name such as ``256x128x64_s4``: block_m, block_n, block_k, stages."""
        return f"{self.block_m}x{self.block_n}x{self.block_k(weights)}_s{self.stages}"


def _shapes(line_bytes: int, *sizes: tuple[int, int, int]) -> tuple[Shape, ...]:
    return tuple(Shape(block_m=m, warp_groups=groups, line_bytes=line_bytes, stages=stages) for m, groups, stages in sizes)


SHAPES: dict[int, tuple[Shape, ...]] = {
    8: _shapes(64, (128, 3, 5), (192, 2, 5), (256, 2, 4)),
    4: _shapes(32, (128, 3, 5), (192, 2, 5), (256, 2, 4)),
}
"""Shapes by the bits of a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(MixedConfig):
    """Shape plus launch parameters.

    At most ``blocks`` persistent blocks walk over the tiles. They divide tiles that do not fill all blocks along K. With ``whole``
    no tile is divided.
    """

    shape: Shape
    blocks: int = 132
    whole: bool = False

    def label(self, weights: Weights) -> str:
        """Return a name such as ``i4_256x128x64_s4_b132_whole_pdl4``."""
        kernel, _, launch = super(Config, self).label(weights).rpartition("_k1")
        return f"{kernel}_b{self.blocks}{'_whole' if self.whole else ''}{launch}"


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
        """Return the division of a launch."""
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
