"""Configs of the cluster kernel: a compile-time ``Shape``, launch parameters, and the legality predicate."""

from dataclasses import dataclass

from ....device import DeviceInfo
from ....problem import Problem
from ..boxes import grid_of, why_not_staged_tiles
from ..hopper import BARRIER_BYTES, HALF_SMEM_BYTES, MOST_CLUSTER, WGMMA_M

IN_FLIGHT, MORE_IN_FLIGHT = 8, 16
"""Loads of partial sums that one thread has in flight."""
CONTIGUOUS_PARTS = 8
"""Most blocks for which contiguous parts of K are read faster than interleaved ones."""
MOST_TILES = 2**15
"""Limit of the tile count. A grid dimension has up to 65535 blocks."""
WARP = 32
MOST_PARTS_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tile of ``block_m`` by ``block_n`` sums, with ``block_k`` elements of K in each of ``stages``.

    A cluster has ``cluster_m`` by ``cluster_n`` tiles, along M and N. It copies operands that its tiles share once (multicast). The
    ``cluster_k`` blocks of a tile divide K.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    cluster_k: int = 1
    cluster_m: int = 1
    cluster_n: int = 1

    @property
    def cluster_tiles(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def cluster(self) -> int:
        return self.cluster_tiles * self.cluster_k

    @property
    def warp_groups(self) -> int:
        return self.block_m // WGMMA_M

    @property
    def threads(self) -> int:
        return 128 * self.warp_groups + 32

    @property
    def sent_bytes(self) -> int:
        """Bytes of sums that a block receives from the other blocks of its tile. It sends the same number."""
        return 4 * self.block_m * self.block_n // self.cluster_k * (self.cluster_k - 1)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: stages, received sums, barriers and a counter word."""
        stages_bytes = self.stages * (self.block_m + self.block_n) * self.block_k * 2
        barriers = 2 * self.stages + self.warp_groups + 1
        return stages_bytes + self.sent_bytes + BARRIER_BYTES * barriers

    @property
    def blocks_per_sm(self) -> int:
        """Blocks per multiprocessor. With two, a block of the next launch can start while one of the last ends."""
        return 2 if self.shared_bytes <= HALF_SMEM_BYTES else 1

    @property
    def prefetch_stages(self) -> int:
        """Stages to prefetch into L2 while the previous launch ends: few with one block per multiprocessor."""
        return self.stages if self.blocks_per_sm > 1 else self.stages // 2

    @property
    def in_flight(self) -> int:
        """Partial sums that one thread reads. A warp of 32 threads covers 32 times as many clusters.

        Without split-K in the cluster, a tile has more partial sums, and the number is higher. More than two warp groups per
        multiprocessor leave too few registers for that.
        """
        return MORE_IN_FLIGHT if self.cluster_k == 1 and self.warp_groups * self.blocks_per_sm <= 2 else IN_FLIGHT

    def __str__(self) -> str:
        tiles = f"_{self.cluster_m}x{self.cluster_n}" if self.cluster_tiles > 1 else ""
        return f"{self.block_m}x{self.block_n}x{self.block_k}_s{self.stages}_k{self.cluster_k}{tiles}"


def _shapes(
    block_m: int, block_n: int, block_k: int, stages: int, *cluster_k: int, tiles: tuple[int, int] = (1, 1)
) -> tuple[Shape, ...]:
    cluster_m, cluster_n = tiles
    return tuple(
        Shape(
            block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, cluster_k=n, cluster_m=cluster_m, cluster_n=cluster_n
        )
        for n in cluster_k
    )


SHAPES: tuple[Shape, ...] = (
    *_shapes(64, 64, 64, 6, 4, 8),
    *_shapes(64, 64, 64, 12, 2),
    *_shapes(64, 64, 64, 6, 2, tiles=(2, 2)),
    *_shapes(64, 64, 128, 6, 2, tiles=(2, 2)),
    *_shapes(64, 96, 64, 10, 4, tiles=(2, 1)),
    *_shapes(128, 64, 64, 8, 1, tiles=(2, 2)),
    *_shapes(128, 64, 64, 8, 2, tiles=(1, 2)),
    *_shapes(64, 16, 128, 5, 2),
    *_shapes(64, 32, 128, 4, 2),
    *_shapes(128, 16, 64, 6, 2),
    *_shapes(128, 32, 64, 5, 2),
)
"""All shapes.

Most have as many stages as fit with two blocks per multiprocessor, so that a launch can start while the previous one ends. Others
have twice the bytes, for long parts of K, or if several blocks must release a stage before it is refilled.
"""
MIDDLE: tuple[Shape, ...] = (*_shapes(64, 160, 64, 7, 4, tiles=(2, 1)), *_shapes(128, 64, 64, 8, 2))
"""Shapes for more than 64 rows and columns. A multiprocessor has one block, and all clusters run at once."""
ONE_RUN: tuple[Shape, ...] = tuple(
    shape
    for tiles in ((1, 1), (1, 2), (2, 1))
    for size in ((64, 16, 128, 10), (64, 32, 128, 8), (64, 48, 128, 7), (64, 64, 128, 6))
    for shape in _shapes(*size, 1, tiles=tiles)
)
"""Shapes that sum K in one run, for batch invariance. A multiprocessor has one block, with as many bytes in flight as fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shape plus launch parameters.

    ``clusters_per_tile`` clusters divide K again. ``swap_ab``: compute outᵀ = bᵀ aᵀ, so that columns of b are the tile's rows.
    ``pdl``: the launch may begin before the previous one ends, and prefetches its first ``prefetch_stages`` into L2. If two blocks
    share a multiprocessor, the prefetch stays that far ahead.
    """

    shape: Shape
    clusters_per_tile: int = 1
    swap_ab: bool = False
    pdl: bool = False
    prefetch_stages: int = 0

    @property
    def parts(self) -> int:
        return self.clusters_per_tile * self.shape.cluster_k

    @property
    def interleaved_k(self) -> bool:
        """True if parts of K alternate step by step. Otherwise each part is contiguous."""
        return self.parts > CONTIGUOUS_PARTS

    def __str__(self) -> str:
        overlap = f"_pdl{self.prefetch_stages or ''}" if self.pdl else ""
        return f"{self.shape}_g{self.clusters_per_tile}{'_swap' if self.swap_ab else ''}{overlap}"


def clusters_of(problem: Problem, config: Config) -> int:
    """Return the clusters that cover all results of the batch. At the edges they may include tiles outside."""
    tiles_m, tiles_n = grid_of(problem, config)
    return -(-tiles_m // config.shape.cluster_m) * -(-tiles_n // config.shape.cluster_n) * problem.batch


def tiles_of(problem: Problem, config: Config) -> int:
    """Return the tiles of those clusters."""
    return clusters_of(problem, config) * config.shape.cluster_tiles


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    shape = config.shape
    if (reason := device.why_no_smem(shape.shared_bytes)) is not None:
        return reason
    if shape.cluster > MOST_CLUSTER:
        return f"a cluster has {shape.cluster} blocks, at most {MOST_CLUSTER} can be relied on"
    most = WARP * shape.in_flight
    if config.clusters_per_tile > most:
        return f"{config.clusters_per_tile} clusters share a tile, at most {most} can"
    steps = -(-problem.k // shape.block_k)
    if config.parts > steps:
        return f"K has {steps} steps, too few for {config.parts} parts"
    return _room(problem, config) or why_not_staged_tiles(problem, config, shape.block_k)


def _room(problem: Problem, config: Config) -> str | None:
    """Return the reason why tiles exceed the grid, the cluster or the memory for partial sums, or None."""
    shape, tiles = config.shape, tiles_of(problem, config)
    if tiles > MOST_TILES:
        return f"{tiles} tiles, at most {MOST_TILES} fit a grid"
    tiles_m, tiles_n = grid_of(problem, config)
    if tiles_m < shape.cluster_m or tiles_n < shape.cluster_n:
        return f"a cluster has {shape.cluster_m}x{shape.cluster_n} tiles, the result {tiles_m}x{tiles_n}"
    parts_bytes = tiles * config.clusters_per_tile * shape.block_m * shape.block_n * 4 if config.clusters_per_tile > 1 else 0
    if parts_bytes > MOST_PARTS_BYTES:
        return f"{parts_bytes} bytes of sums in memory, at most {MOST_PARTS_BYTES}"
    return None
