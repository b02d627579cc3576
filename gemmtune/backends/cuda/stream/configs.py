"""Configs of the persistent kernel: a compile-time ``Shape``, launch parameters, division of tiles, legality predicate."""

from __future__ import annotations

from dataclasses import dataclass

from ....device import DeviceInfo
from ....problem import Problem
from ..boxes import by_k, why_not_staged_tiles
from ..family import INT32_LIMIT
from ..hopper import BARRIER_BYTES, GIVEN_REGISTERS, LEFT_REGISTERS, SMEM_BYTES, SWIZZLED_LINES, WGMMA_M

BLOCK_K = 64
"""Elements of K in a stage: one swizzled line of an operand whose K is contiguous."""
REGISTERS = {1: None, 2: (GIVEN_REGISTERS, LEFT_REGISTERS), 3: (32, 160)}
"""Registers of a copying and of a multiplying thread, by the warp groups that multiply. None: the compiler gives all the most."""
MOST_BLOCK_N = {1: 208, 2: 256, 3: 176}
"""Maximum lines of q without spilled sums, by the warp groups that multiply."""
BLOCK_N_STEP = 8
"""Step of block_n."""
QUAD_BYTES, MOST_QUADS, RAGGED_QUADS = 256, 8, 4
"""Space in which a warp reorders 8 lines of q of its results, the most times 8 lines at once, and those of an odd number."""
MOST_BLOCKS = 256
"""Maximum persistent blocks. More than multiprocessors would only wait."""
LEAST_STEPS, MOST_PARTS = 8, 6
"""Fewest steps of a part of a tile, and maximum parts. Exchanging more sums takes longer than it saves."""
MOST_LOADS = 16
"""Maximum quads of others' sums that a thread loads at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tile of ``block_m`` lines of p by ``block_n`` lines of q. p is a and q the transpose of b, or the other way with ``swap_ab``.

    A cluster has ``cluster_m`` by ``cluster_n`` tiles, and copies operands that its tiles share once (multicast). There are as many
    stages as fit.
    """

    block_m: int
    block_n: int
    cluster_m: int = 1
    cluster_n: int = 1

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def warp_groups(self) -> int:
        """Warp groups that multiply, each 64 lines of p."""
        return self.block_m // WGMMA_M

    @property
    def multiplying(self) -> int:
        return 128 * self.warp_groups

    @property
    def threads(self) -> int:
        return self.multiplying + 128

    @property
    def stored_bytes(self) -> int:
        """Space in which a warp reorders results: a power of two of quads that divides those of a tile, unless ``ragged``."""
        quads = self.block_n // 8
        return QUAD_BYTES * (RAGGED_QUADS if self.ragged else min(quads & -quads, MOST_QUADS))

    @property
    def ragged(self) -> bool:
        """True if a tile has an odd number of quads: the last part that a warp reorders is smaller."""
        return self.block_n // 8 % 2 > 0

    @property
    def loads(self) -> int:
        """Quads of others' sums that a thread loads at once: a divisor of its own quads."""
        return max(n for n in range(1, MOST_LOADS + 1) if self.block_n // 8 % n == 0)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage and its barriers."""
        return 2 * BLOCK_K * (self.block_m + self.block_n) + 2 * BARRIER_BYTES

    @property
    def stages(self) -> int:
        return (SMEM_BYTES - self.multiplying // 32 * self.stored_bytes) // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: stages with their barriers, and the staging buffers of results."""
        return self.stages * self.stage_bytes + self.multiplying // 32 * self.stored_bytes

    @property
    def sums_bytes(self) -> int:
        return 4 * self.block_m * self.block_n

    def __str__(self) -> str:
        tiles = f"_{self.cluster_m}x{self.cluster_n}" if self.cluster > 1 else ""
        return f"{self.block_m}x{self.block_n}x{BLOCK_K}_s{self.stages}{tiles}"


SHAPES: tuple[Shape, ...] = tuple(
    Shape(block_m=block_m, block_n=block_n, cluster_m=cluster_m, cluster_n=cluster_n)
    for block_m in (64, 128, 192)
    for cluster_m, cluster_n in ((1, 1), (2, 1), (1, 2))
    for block_n in range(32, MOST_BLOCK_N[block_m // WGMMA_M] + 1, BLOCK_N_STEP * cluster_m)
)
"""All shapes.

Widths rise in small steps, so that one of them divides a result into about as many tiles as there are multiprocessors.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shape plus launch parameters.

    At most ``blocks`` persistent blocks walk over the tiles. They divide tiles that do not fill all blocks along K. With ``whole``
    no tile is divided. ``swap_ab``: compute outᵀ = bᵀ aᵀ, so that columns of b are the tile's rows. ``pdl``: the launch may begin
    before the previous one ends, and prefetches its first ``prefetch_stages`` of b into L2.
    """

    shape: Shape
    blocks: int = 132
    swap_ab: bool = False
    whole: bool = False
    pdl: bool = False
    prefetch_stages: int = 0

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the result in the tiles of a cluster."""
        tile = self.shape.block_m * self.shape.cluster_m, self.shape.block_n * self.shape.cluster_n
        return tile[::-1] if self.swap_ab else tile

    def __str__(self) -> str:
        overlap = f"_pdl{self.prefetch_stages or ''}" if self.pdl else ""
        return f"{self.shape}{'_swap' if self.swap_ab else ''}_b{self.blocks}{'_whole' if self.whole else ''}{overlap}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Division of clusters' tiles with ``steps`` of K each: ``clusters`` have ``waves`` whole tiles each.

    The first ``shared`` tiles have ``parts`` of one cluster each. The last part belongs to the tile's owner.
    """

    steps: int
    clusters: int
    waves: int
    shared: int = 0
    parts: int = 1

    @classmethod
    def of(cls, problem: Problem, config: Config) -> Division:
        rows, cols = tiles_of(problem, config)
        steps, clusters = -(-problem.k // BLOCK_K), config.blocks // config.shape.cluster
        waves, left = divmod(rows * cols, clusters)
        parts = min(clusters // left, steps // LEAST_STEPS, MOST_PARTS) if left and not config.whole else 1
        if parts <= 1:
            return cls(steps=steps, clusters=min(clusters, rows * cols), waves=waves + (left > 0))
        return cls(steps=steps, clusters=clusters if waves else parts * left, waves=waves, shared=left, parts=parts)

    def each(self, lead: float) -> int:
        """Return the steps of every part but the owner's, which has ``lead`` more."""
        return max(1, round((self.steps - lead) / self.parts))


def tiles_of(problem: Problem, config: Config) -> tuple[int, int]:
    """Return the clusters of tiles that cover the result's rows and columns."""
    rows, cols = config.tile
    return -(-problem.m // rows), -(-problem.n // cols)


def lines_of(problem: Problem, config: Config) -> int:
    """Return the rows of a that a tile copies: an equal share of all, so that few are outside, which TMA copies slowly."""
    shape, swap_ab = config.shape, config.swap_ab
    most, tiles = (shape.block_n, shape.cluster_n) if swap_ab else (shape.block_m, shape.cluster_m)
    if not by_k(problem.a):
        return most
    share, unit = -(-problem.m // (tiles_of(problem, config)[0] * tiles)), SWIZZLED_LINES * (shape.cluster // tiles)
    return min(most, -(-share // unit) * unit)


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    shape = config.shape
    if (reason := device.why_no_smem(shape.shared_bytes)) is not None:
        return reason
    most = MOST_BLOCK_N.get(shape.warp_groups, 0)
    if shape.block_m % WGMMA_M or shape.block_n % BLOCK_N_STEP or not 0 < shape.block_n <= most:
        widths = f"block_n in multiples of {BLOCK_N_STEP} up to {most or max(MOST_BLOCK_N.values())}"
        return f"got {shape}, expected block_m of 64, 128 or 192, and {widths}"
    if not shape.cluster <= config.blocks <= MOST_BLOCKS:
        return f"{config.blocks} blocks, expected {shape.cluster} to {MOST_BLOCKS}"
    rows, cols = tiles_of(problem, config)
    if rows * cols + 2 * config.blocks >= INT32_LIMIT:
        return f"{rows * cols} tiles cannot be counted in 32 bits"
    return why_not_staged_tiles(problem, config, BLOCK_K)
