"""A config: what is compiled, a ``Shape`` of the kernel, and what a launch is told."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SHAPES", "Config", "Shape"]

BARRIER_BYTES = 8
HALF_BYTES = 113 * 1024
"""Of shared memory, for each of two blocks on one multiprocessor: 228 KiB less 1 KiB that the system has of each."""
AT_ONCE, MORE_AT_ONCE = 8, 16
"""Parts of a sum that one thread reads."""
FEW_PARTS = 8
"""Of K: as many blocks read lines of their own quicker than in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of the kernel: a tile of ``rows`` by ``cols`` sums, ``depth`` elements of K in each of ``stages``.

    ``blocks`` thread blocks of a cluster share a tile, each with its part of K. A cluster has ``spread_rows`` by ``spread_cols``
    tiles below and beside each other, and copies once what several of them multiply.
    """

    rows: int
    cols: int
    depth: int
    stages: int
    blocks: int = 1
    spread_rows: int = 1
    spread_cols: int = 1

    @property
    def spread(self) -> int:
        """Tiles of a cluster."""
        return self.spread_rows * self.spread_cols

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.spread * self.blocks

    @property
    def warp_groups(self) -> int:
        """That multiply, 64 rows each."""
        return self.rows // 64

    @property
    def threads(self) -> int:
        """Of a block: the warp groups that multiply, and a warp that copies."""
        return 128 * self.warp_groups + 32

    @property
    def sent_bytes(self) -> int:
        """Sums that a block is sent by the others of its tile, and as many that it gives them."""
        return 4 * self.rows * self.cols // self.blocks * (self.blocks - 1)

    @property
    def shared_bytes(self) -> int:
        """Of a block: stages, the sums that it is sent, barriers and a word."""
        stages_bytes = self.stages * (self.rows + self.cols) * self.depth * 2
        barriers = 2 * self.stages + self.warp_groups + 1
        return stages_bytes + self.sent_bytes + BARRIER_BYTES * barriers

    @property
    def resident(self) -> int:
        """Blocks on a multiprocessor: with two, one of the next launch can begin while one of the last ends."""
        return 2 if self.shared_bytes <= HALF_BYTES else 1

    @property
    def ahead(self) -> int:
        """Steps to ask into L2 while the launch before ends. Where a block begins when that leaves, little time is left."""
        return self.stages if self.resident > 1 else self.stages // 2

    @property
    def at_once(self) -> int:
        """Parts of a sum that one thread reads; all 32 of a warp read those of 32 times as many clusters.

        More where a cluster does not divide K, because the tile then has more parts; with more than two warp groups on a
        multiprocessor a thread has too few registers for them.
        """
        return MORE_AT_ONCE if self.blocks == 1 and self.warp_groups * self.resident <= 2 else AT_ONCE

    def __str__(self) -> str:
        tiles = f"_{self.spread_rows}x{self.spread_cols}" if self.spread > 1 else ""
        return f"{self.rows}x{self.cols}x{self.depth}_s{self.stages}_k{self.blocks}{tiles}"


def _shapes(rows: int, cols: int, depth: int, stages: int, *blocks: int, spread: tuple[int, int] = (1, 1)) -> tuple[Shape, ...]:
    below, beside = spread
    return tuple(
        Shape(rows=rows, cols=cols, depth=depth, stages=stages, blocks=n, spread_rows=below, spread_cols=beside) for n in blocks
    )


SHAPES: tuple[Shape, ...] = (
    *_shapes(64, 64, 64, 6, 4, 8),
    *_shapes(64, 64, 64, 12, 2),
    *_shapes(64, 64, 64, 6, 2, spread=(2, 2)),
    *_shapes(64, 64, 128, 6, 2, spread=(2, 2)),
    *_shapes(64, 96, 64, 10, 4, spread=(2, 1)),
    *_shapes(128, 64, 64, 8, 1, spread=(2, 2)),
    *_shapes(128, 64, 64, 8, 2, spread=(1, 2)),
    *_shapes(64, 16, 128, 5, 2),
    *_shapes(64, 32, 128, 4, 2),
    *_shapes(128, 16, 64, 6, 2),
    *_shapes(128, 32, 64, 5, 2),
)
"""As many stages as let two blocks be on one multiprocessor, so that one launch can begin while the one before it ends; or twice as
many bytes, where each part of a sum is long or several blocks have to be done with a stage before it is filled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """``groups`` clusters share a tile. ``swapped``: outᵀ = bᵀ aᵀ, so that b's columns are the tile's rows.

    ``pdl``: the launch may begin before the one before it has ended; ``ahead`` steps are then asked into L2 meanwhile. Beside
    another block on its multiprocessor, a block stays as many ahead.
    """

    shape: Shape
    groups: int = 1
    swapped: bool = False
    pdl: bool = False
    ahead: int = 0

    @property
    def parts(self) -> int:
        """Of K."""
        return self.groups * self.shape.blocks

    @property
    def dealt(self) -> bool:
        """The parts of K take turns, step by step, rather than have each a piece of it."""
        return self.parts > FEW_PARTS

    def __str__(self) -> str:
        overlap = f"_pdl{self.ahead or ''}" if self.pdl else ""
        return f"{self.shape}_g{self.groups}{'_swap' if self.swapped else ''}{overlap}"
