"""Launch variants of a compiled kernel: the order of its tiles and the division of K, if they make a difference."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ...toolchain.orientation import Oriented
from .operation import Operation

Decomposition = Literal["heuristic", "dataparallel", "splitk", "streamk"]
DECOMPOSITIONS: tuple[Decomposition, ...] = ("heuristic", "dataparallel", "splitk", "streamk")
"""Decompositions in the order of the modes in gemm3x.cu.jinja."""
SPLITS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
LEAST_STEPS = 4
"""Minimum main loop steps in a part of split-K. A shorter part only fills the pipeline."""
MOST_WAVES = 2.1
"""Maximum waves of blocks that split-K makes. More only add sums to store and read."""
STREAM_K_STEPS = 8
"""CUTLASS's minimum steps in a part of stream-K, ``min_iters_per_sk_unit_`` in tile_scheduler_params.h."""
SWIZZLES = (1, 2, 4, 8)
LEAST_TILES = {1: 1, 2: 2, 4: 3, 8: 6}
"""Minimum tiles along the shorter side for each swizzle (``get_log_swizzle_size`` in tile_scheduler_params.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Launch arguments that vary for one kernel.

    ``raster``: tiles advance along ``m`` or ``n`` first. ``swizzle``: in groups of 1, 2, 4 or 8. ``decomposition`` is for stream-K
    operations. With ``heuristic`` CUTLASS decides. With ``dataparallel`` K is not divided. With ``splitk`` every tile has
    ``splits`` parts. With ``streamk`` the tiles of the last waves are divided evenly.
    """

    raster: str = "m"
    swizzle: int = 1
    decomposition: Decomposition = "heuristic"
    splits: int = 1

    def __str__(self) -> str:
        divided = {"heuristic": "", "splitk": f"_splitk{self.splits}"}.get(self.decomposition, f"_{self.decomposition}")
        return f"raster{self.raster}_swizzle{self.swizzle}{divided}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Tiles on one problem, ``rows`` × ``cols`` in whole clusters for each of ``batch`` matrices, with ``steps`` each."""

    rows: int
    cols: int
    batch: int
    steps: int
    multiprocessors: int
    tile: tuple[int, int]
    cluster: tuple[int, int]

    @classmethod
    def of(cls, operation: Operation, oriented: Oriented, batch: int, multiprocessors: int) -> "Grid":
        m, n, k = oriented.sizes
        tile_m, tile_n, tile_k = operation.tile
        if operation.transposes:
            tile_m, tile_n = tile_n, tile_m
        cluster_m, cluster_n = operation.cluster[:2]
        return cls(
            rows=math.ceil(m / (tile_m * cluster_m)) * cluster_m,
            cols=math.ceil(n / (tile_n * cluster_n)) * cluster_n,
            batch=batch,
            steps=math.ceil(k / tile_k),
            multiprocessors=multiprocessors,
            tile=(tile_m, tile_n),
            cluster=(cluster_m, cluster_n),
        )

    @property
    def tiles(self) -> int:
        return self.rows * self.cols * self.batch

    @property
    def at_once(self) -> int:
        """Tiles that run at once, one per multiprocessor, in whole clusters."""
        size = self.cluster[0] * self.cluster[1]
        return max(self.multiprocessors // size * size, size)


def legal_variants(operation: Operation, grid: Grid) -> tuple[Variant, ...]:
    """Return all launch variants that make a difference. The first one is tried first, before others are requested."""
    divided = tuple(_divided(grid)) if operation.stream_k else (("heuristic", 1),)
    return tuple(
        Variant(raster=raster, swizzle=swizzle, decomposition=decomposition, splits=splits)
        for (decomposition, splits), (raster, swizzle) in itertools.product(divided, _orders(grid))
    )


def neighbours(variant: Variant, among: tuple[Variant, ...]) -> tuple[Variant, ...]:
    """Return the variants in ``among`` that differ from ``variant`` in either the division of K or the order of tiles."""

    def divided(x: Variant) -> tuple[str, int]:
        return x.decomposition, x.splits

    def order(x: Variant) -> tuple[str, int]:
        return x.raster, x.swizzle

    return tuple(x for x in among if (divided(x) == divided(variant)) != (order(x) == order(variant)))


def most_splits(variant: Variant, operation: Operation, grid: Grid) -> int:
    """Return the maximum number of partial sums of a result."""
    if not operation.stream_k or variant.decomposition == "dataparallel":
        return 1
    if variant.decomposition == "splitk":
        return min(variant.splits, grid.steps)
    return max(1, min(grid.steps, grid.multiprocessors))


def _orders(grid: Grid) -> Iterator[tuple[str, int]]:
    rows, cols = grid.rows // grid.cluster[0], grid.cols // grid.cluster[1]
    shorter_first = "mn" if cols > rows else "nm"
    if min(rows, cols) == 1:
        yield shorter_first[0], 1
        return
    swizzles = [s for s in SWIZZLES if min(grid.rows, grid.cols) >= LEAST_TILES[s]]
    for swizzle in swizzles:
        for raster in shorter_first:
            yield raster, swizzle


def _divided(grid: Grid) -> Iterator[tuple[Decomposition, int]]:
    yield "heuristic", 1
    tail = grid.tiles % grid.at_once
    if tail == 0 or grid.steps <= STREAM_K_STEPS:  # whole waves or a short K: data-parallel in any case
        return
    most_units = min(grid.at_once, grid.tiles * grid.steps // STREAM_K_STEPS)
    divides = 2 * tail < grid.at_once  # like CUTLASS's heuristic
    same_splits = most_units // grid.tiles if divides and most_units % grid.tiles == 0 else 1
    if divides and grid.tiles > grid.at_once:
        yield "dataparallel", 1
    if not divides or same_splits > 1:
        yield "streamk", 1
    for splits in SPLITS:
        fits = grid.tiles * splits <= MOST_WAVES * grid.at_once and grid.steps >= LEAST_STEPS * splits
        if fits and splits != same_splits:
            yield "splitk", splits
