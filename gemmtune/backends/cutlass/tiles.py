"""Our own operations: CUTLASS's collective builders accept more tiles than its generator lists.

The generator lists powers of two: tiles 128 bytes deep, with at least 16 columns and, except for 256 columns, at least 128 rows.
Measured on an H200, an operation of ours was the fastest for 12 of 18 bfloat16 products of all proportions, by 3 to 30%. Tiles with
192 rows or columns fill whole waves for many products for which 128 and 256 do not. Deep tiles with 8 to 64 columns (the problem's
rows, with swapped operands) waste few multiplications while weights are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ...problem.scales import SCALE_BLOCK
from .operation import BLOCKWISE, FAST_ACCUM, Operation, bytes_of

Kind = Literal["pingpong", "cooperative", "stream_k", "sliced2", "sliced3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """CUTLASS types of a schedule, and its label in CUTLASS's names."""

    label: str
    kernel: str
    epilogue: str
    scheduler: str
    slices: int = 1


def _schedule(label: str, kind: str, scheduler: str, slices: int = 1) -> Schedule:
    return Schedule(
        label=label,
        kernel=f"cutlass::gemm::KernelTmaWarpSpecialized{kind}",
        epilogue=f"cutlass::epilogue::TmaWarpSpecialized{kind.removesuffix('Pingpong')}",
        scheduler=scheduler,
        slices=slices,
    )


KINDS: dict[Kind, Schedule] = {
    "pingpong": _schedule("warpspecialized_pingpong", "Pingpong", "Default"),
    "cooperative": _schedule("warpspecialized_cooperative", "Cooperative", "Default"),
    "stream_k": _schedule("stream_k_warpspecialized_cooperative", "Cooperative", "StreamK"),
    "sliced2": _schedule("warpspecialized_slicedk2", "Pingpong", "SlicedK", 2),
    "sliced3": _schedule("warpspecialized_slicedk3", "Pingpong", "SlicedK", 3),
}
"""Schedules by kind. The sliced ones run CUTLASS's main loop and epilogue in a kernel of ours, whose warp groups share a tile."""
LINE_BYTES = 128
"""Unit of a tile's depth: bytes of a row in TMA's widest swizzle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile of ``rows`` × ``cols``, ``lines`` × 128 bytes deep. Its block is one of a cluster of ``cluster`` rows × columns.

    Half a line is 32 elements of two bytes, the size of the smallest group of weights that shares a scale.
    """

    kind: Kind
    rows: int
    cols: int
    lines: float
    cluster: tuple[int, int]

    def depth(self, element_bytes: int) -> int:
        """Return the elements along K."""
        return int(self.lines * LINE_BYTES) // element_bytes

    @property
    def halved(self) -> Tile:
        """Same tile with half a line."""
        return dataclasses.replace(self, lines=0.5)

    @classmethod
    def of(cls, operation: Operation) -> Tile | None:
        """Return the tile of ``operation``, or None if its schedule or depth is not one of ours."""
        lines = operation.tile[2] * bytes_of(operation.multiplied, 1) / LINE_BYTES
        kernel = operation.kernel_schedule.removesuffix(FAST_ACCUM).removesuffix(BLOCKWISE)
        schedules = (kernel, operation.epilogue_schedule, operation.scheduler, operation.slices)
        for kind, schedule in KINDS.items():
            if schedules == (schedule.kernel, schedule.epilogue, schedule.scheduler, schedule.slices) and 2 * lines % 1 == 0:
                rows, cols, _ = operation.tile
                return cls(kind=kind, rows=rows, cols=cols, lines=lines, cluster=operation.cluster[:2])
        return None


def _tiles(kind: Kind, text: str) -> tuple[Tile, ...]:
    """Parse tiles. ``64x16x2:1x1,2x1`` means 64 rows, 16 columns and 2 lines, in clusters of one block and of two."""
    found = []
    for word in text.split():
        sizes, clusters = word.split(":")
        rows, cols, lines = map(int, sizes.split("x"))
        for cluster in clusters.split(","):
            first, second = map(int, cluster.split("x"))
            found.append(Tile(kind=kind, rows=rows, cols=cols, lines=lines, cluster=(first, second)))
    return tuple(found)


TILES: tuple[Tile, ...] = (
    *_tiles(
        "pingpong",
        "64x8x2:1x1 64x8x4:1x1 64x16x2:1x1,2x1,4x1 64x16x4:1x1 64x32x2:1x1,2x1 64x32x4:1x1 64x64x2:1x1,2x1,4x1 64x64x4:1x1 "
        "64x96x2:1x1 64x128x1:2x1,1x2 64x128x2:1x1 64x192x1:1x1,2x1,1x2 64x256x1:2x1,1x2 "
        "128x16x2:1x1 128x64x1:1x1,2x1,1x2 128x64x2:1x1 128x96x1:1x1,2x1,1x2 128x128x1:1x1,2x1,1x2 128x128x2:1x1 "
        "128x160x1:2x1 128x192x1:1x1,2x1,1x2 192x64x1:1x1,2x1,1x2 192x128x1:1x1,2x1,1x2",
    ),
    *_tiles(
        "cooperative",
        "128x128x1:2x1 128x192x1:1x1,2x1,1x2 128x256x1:1x1,2x1,1x2 256x32x1:1x1 256x64x1:2x1 256x96x1:2x1 "
        "256x128x1:1x1,2x1,1x2 256x192x1:1x1,2x1,1x2",
    ),
    *_tiles(
        "stream_k",
        "128x8x2:1x1 128x8x4:1x1 128x16x2:1x1,2x1 128x16x4:1x1 128x32x2:1x1,2x1 128x64x1:1x1 128x64x2:1x1,2x1 "
        "128x128x1:1x1,2x1,1x2 128x128x2:2x1 128x192x1:2x1 128x256x1:1x1,2x1,1x2 256x64x1:2x1 256x128x1:1x1,2x1,1x2 256x192x1:2x1",
    ),
)
"""All tiles: those that were fastest or nearly so for some product, with variations of their clusters.

Clusters of four appear only if every tile of weights reads the same few rows. Four tiles then share them (4 to 7% at 16 and 64
rows). Four does not divide the number of multiprocessors in every part of a GPU, so some stay idle.
"""

SLICED: tuple[Tile, ...] = (
    *_tiles("sliced2", "64x8x2:1x1 64x16x2:1x1 64x32x2:1x1 64x64x2:1x1"),
    *_tiles("sliced3", "64x16x2:1x1"),
)
"""Tiles of few columns, whose weights are read once. All warp groups of a multiprocessor convert them."""

GROUPED: tuple[Tile, ...] = (
    *_tiles("pingpong", "64x128x1:1x1,2x1 128x128x1:1x1,2x1"),
    *_tiles("cooperative", "128x256x1:1x1,2x1 256x128x1:2x1"),
)
"""Tiles for groups of rows."""
GROUPED_SWAPPED: tuple[Tile, ...] = _tiles("pingpong", "64x16x2:1x1 64x32x2:1x1 128x64x1:1x1")
"""Tiles for small groups, whose rows are the tile's columns."""

SHARED: frozenset[Tile] = frozenset(
    (
        *_tiles(
            "pingpong",
            "64x8x4:1x1 64x16x2:2x1 64x16x4:1x1 64x32x2:1x1 64x64x2:1x1,4x1 64x192x1:1x2 128x64x1:2x1,1x2 128x128x1:1x1,1x2 "
            "128x192x1:1x2 192x128x1:2x1",
        ),
        *_tiles("cooperative", "128x192x1:2x1 128x256x1:1x1,2x1 256x128x1:1x1 256x192x1:1x2"),
        *_tiles("stream_k", "128x16x2:1x1 128x64x1:1x1 128x128x1:1x2 128x256x1:2x1"),
    )
)
"""Tiles that a search tries first, so that problems share compilations.

72 operations were measured on 18 products. Each step added the one that brought the set's fastest closest to the overall fastest on
average: 16 are within 0.1% of it. Three more are near the fastest for large products, whose order changes with the clocks from run
to run. One serves 64 rows.
"""


SHARED_CONVERTING: frozenset[Tile] = frozenset(
    (
        *SLICED,
        *_tiles("pingpong", "64x8x2:1x1 64x16x2:1x1 64x32x2:1x1 64x64x2:1x1 64x256x1:2x1"),
        *_tiles("cooperative", "128x128x1:2x1"),
        *_tiles("stream_k", "128x16x2:1x1 128x64x2:1x1 128x128x1:1x2 128x256x1:2x1"),
    )
)
"""Tiles that a search tries first if the first operand is converted in registers."""
SHARED_HALVED = frozenset(tile.halved for tile in SHARED_CONVERTING - frozenset(SLICED))
"""Tiles that a search tries first for groups of 32 weights."""


def is_shared(operation: Operation) -> bool:
    """Return True if a search tries the operation's tile first."""
    return Tile.of(operation) in (SHARED_CONVERTING | SHARED_HALVED if operation.converts else SHARED)


def own_operations(found: Iterable[Operation]) -> Iterator[Operation]:
    """Yield TILES for every combination of elements and layouts among ``found`` that loads and stores through TMA."""
    models: dict[tuple[str, ...], Operation] = {}
    for op in sorted(found, key=lambda op: op.c != "void"):
        if op.tma_store and op.introduced == 90:
            models.setdefault((op.a, op.b, op.d, op.accumulator, op.layout_a, op.layout_b, op.layout_d), op)
    for model in models.values():
        yield from tiled(model, TILES)


SUFFIXES = {"": "", FAST_ACCUM: "_fp8_fastaccum", BLOCKWISE: "_fp8_blockwise"}
"""Suffix in CUTLASS's operation names, by schedule suffix."""


def tiled(model: Operation, tiles: Iterable[Tile], suffix: str = "") -> Iterator[Operation]:
    """Yield ``model`` with each of ``tiles``, in the tile's schedule with ``suffix``."""
    for tile in tiles:
        schedule = KINDS[tile.kind]
        sizes = (tile.rows, tile.cols, tile.depth(bytes_of(model.multiplied, 1)))
        cluster = (*tile.cluster, 1)
        label = schedule.label + SUFFIXES[suffix]
        yield dataclasses.replace(
            model, name=_name(model, sizes, cluster, label), tile=sizes, cluster=cluster,
            kernel_schedule=schedule.kernel + suffix, epilogue_schedule=schedule.epilogue, scheduler=schedule.scheduler,
            slices=schedule.slices,
        )  # fmt: skip


def _name(model: Operation, tile: tuple[int, ...], cluster: tuple[int, ...], label: str) -> str:
    """Return the name of an operation by CUTLASS's scheme."""
    sizes = "_".join("x".join(map(str, values)) for values in (tile, cluster))
    scales = [f"{x.extent}x{SCALE_BLOCK}f32x" if x else "" for x in (model.scales_a, model.scales_b)]
    if model.weights:
        scales[0] = f"{model.weights.element}{'z' if model.weights.zero else ''}x"
    elements = "_".join((scales[0] + model.a, scales[1] + model.b, model.accumulator, model.c, model.d))
    layouts = model.layout_a + model.layout_b + model.layout_d
    kind = "gemm_grouped" if model.grouped else "gemm"
    shuffled = "_shuffled" if model.shuffled else ""
    return f"cutlass3x_sm90_tensorop_{kind}_{elements}_{sizes}_0_{layouts}_align{model.alignment_a}_{label}_epi_tma{shuffled}"
