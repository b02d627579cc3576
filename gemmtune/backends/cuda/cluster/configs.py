"""A config: what is compiled, a ``Shape`` of the kernel, and what a launch is told. One predicate says whether it is legal."""

from __future__ import annotations

from dataclasses import dataclass

from ....device import DeviceInfo
from ....problem import Problem
from ..boxes import operands_of, why_not_staged
from ..hopper import BARRIER_BYTES, HALF_SMEM_BYTES, MOST_CLUSTER, WGMMA_M

IN_FLIGHT, MORE_IN_FLIGHT = 8, 16
"""Parts of a sum that one thread has on their way."""
FEW_PARTS = 8
"""The number of blocks up to which parts of K of their own are read quicker than interleaved ones."""
MOST_TILES = 2**15
"""A dimension of a grid has up to 65535 blocks."""
WARP = 32
MOST_PARTS_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tile of ``block_m`` by ``block_n`` sums, with ``block_k`` elements of K in each of ``stages``.

    A cluster has ``cluster_m`` by ``cluster_n`` tiles below and beside each other, and copies once what several of them multiply;
    ``cluster_k`` of its thread blocks share a tile, each with its part of K.
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
        """The tiles of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def cluster(self) -> int:
        """The blocks of a cluster."""
        return self.cluster_tiles * self.cluster_k

    @property
    def warp_groups(self) -> int:
        """The warp groups that multiply."""
        return self.block_m // WGMMA_M

    @property
    def threads(self) -> int:
        """The threads of a block, the copying warp included."""
        return 128 * self.warp_groups + 32

    @property
    def sent_bytes(self) -> int:
        """Sums that a block is sent by the others of its tile, and as many that it gives them."""
        return 4 * self.block_m * self.block_n // self.cluster_k * (self.cluster_k - 1)

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block: stages, the sums that it is sent, barriers and a word."""
        stages_bytes = self.stages * (self.block_m + self.block_n) * self.block_k * 2
        barriers = 2 * self.stages + self.warp_groups + 1
        return stages_bytes + self.sent_bytes + BARRIER_BYTES * barriers

    @property
    def blocks_per_sm(self) -> int:
        """Blocks on a multiprocessor: with two, one of the next launch can begin while one of the last ends."""
        return 2 if self.shared_bytes <= HALF_SMEM_BYTES else 1

    @property
    def prefetch_stages(self) -> int:
        """Stages to ask into L2 while the launch before ends. Where a block begins when that leaves, little time is left."""
        return self.stages if self.blocks_per_sm > 1 else self.stages // 2

    @property
    def in_flight(self) -> int:
        """Parts of a sum that one thread reads; all 32 of a warp read those of 32 times as many clusters.

        More where a cluster does not divide K, because the tile then has more parts; with more than two warp groups on a
        multiprocessor a thread has too few registers for them.
        """
        return MORE_IN_FLIGHT if self.cluster_k == 1 and self.warp_groups * self.blocks_per_sm <= 2 else IN_FLIGHT

    def __str__(self) -> str:
        tiles = f"_{self.cluster_m}x{self.cluster_n}" if self.cluster_tiles > 1 else ""
        return f"{self.block_m}x{self.block_n}x{self.block_k}_s{self.stages}_k{self.cluster_k}{tiles}"


def _shapes(
    block_m: int, block_n: int, block_k: int, stages: int, *cluster_k: int, tiles: tuple[int, int] = (1, 1)
) -> tuple[Shape, ...]:
    below, beside = tiles
    return tuple(
        Shape(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, cluster_k=n, cluster_m=below, cluster_n=beside)
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
"""The shapes with as many stages as let two blocks be on one multiprocessor, so that one launch can begin while the one before it
ends; or twice as
many bytes, where each part of a sum is long or several blocks have to be done with a stage before it is filled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A shape, and what a launch is told: ``clusters_per_tile`` of them divide K again.

    ``swap_ab``: outᵀ = bᵀ aᵀ, so that b's columns are the tile's rows. ``pdl``: the launch may begin before the one before it has
    ended; ``prefetch_stages`` are then asked into L2 meanwhile, and beside another block on its multiprocessor, a block stays as
    many ahead.
    """

    shape: Shape
    clusters_per_tile: int = 1
    swap_ab: bool = False
    pdl: bool = False
    prefetch_stages: int = 0

    @property
    def parts(self) -> int:
        """The parts of K."""
        return self.clusters_per_tile * self.shape.cluster_k

    @property
    def interleaved_k(self) -> bool:
        """The parts of K take turns, step by step, rather than have each a piece of it."""
        return self.parts > FEW_PARTS

    def __str__(self) -> str:
        overlap = f"_pdl{self.prefetch_stages or ''}" if self.pdl else ""
        return f"{self.shape}_g{self.clusters_per_tile}{'_swap' if self.swap_ab else ''}{overlap}"


def grid_of(problem: Problem, config: Config) -> tuple[int, int]:
    """Tiles below and beside each other, as many as it takes to cover the result."""
    rows, cols = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    return -(-rows // config.shape.block_m), -(-cols // config.shape.block_n)


def clusters_of(problem: Problem, config: Config) -> int:
    """The clusters that cover the result once, over all of a batch: at its edges also with tiles that are beyond it."""
    below, beside = grid_of(problem, config)
    return -(-below // config.shape.cluster_m) * -(-beside // config.shape.cluster_n) * problem.batch


def tiles_of(problem: Problem, config: Config) -> int:
    """The tiles of those clusters."""
    return clusters_of(problem, config) * config.shape.cluster_tiles


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem with which ``why_not`` found nothing wrong, or None."""
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
    return _room(problem, config) or _copies(problem, config)


def _room(problem: Problem, config: Config) -> str | None:
    """Why the tiles do not fit the grid, the clusters or the memory for their sums, or None."""
    shape, tiles = config.shape, tiles_of(problem, config)
    if tiles > MOST_TILES:
        return f"{tiles} tiles, at most {MOST_TILES} fit a grid"
    below, beside = grid_of(problem, config)
    if below < shape.cluster_m or beside < shape.cluster_n:
        return f"a cluster has {shape.cluster_m}x{shape.cluster_n} tiles, the result {below}x{beside}"
    parts_bytes = tiles * config.clusters_per_tile * shape.block_m * shape.block_n * 4 if config.clusters_per_tile > 1 else 0
    if parts_bytes > MOST_PARTS_BYTES:
        return f"{parts_bytes} bytes of sums in memory, at most {MOST_PARTS_BYTES}"
    return None


def _copies(problem: Problem, config: Config) -> str | None:
    """Why an operand cannot be copied in such boxes, or None."""
    shape = config.shape
    p, q, _ = operands_of(problem, swap_ab=config.swap_ab)
    return why_not_staged(p, shape.block_m, shape.block_k, shape.cluster_n) or why_not_staged(
        q, shape.block_n, shape.block_k, shape.cluster_m
    )
