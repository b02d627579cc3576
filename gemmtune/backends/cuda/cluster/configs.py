"""A config: what is compiled, a ``Shape`` of the kernel, and what a launch is told."""

from __future__ import annotations

from dataclasses import dataclass

from ..hopper import BARRIER_BYTES, HALF_SMEM_BYTES, WGMMA_M

__all__ = ["SHAPES", "Config", "Shape"]

IN_FLIGHT, MORE_IN_FLIGHT = 8, 16
"""Parts of a sum that one thread has on their way."""
FEW_PARTS = 8
"""As many blocks read parts of K of their own quicker than interleaved ones."""


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
"""As many stages as let two blocks be on one multiprocessor, so that one launch can begin while the one before it ends; or twice as
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
