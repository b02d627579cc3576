"""Our own operations: CUTLASS's collective builders accept more tiles than its generator lists.

The generator lists powers of two: tiles 128 bytes deep, with at least 16 columns and, except for 256 columns, at least 128 rows.
Measured on an H200, an operation of ours was the fastest for 12 of 18 bfloat16 products of all proportions, by 3 to 30%. Tiles with
192 rows or columns fill whole waves for many products for which 128 and 256 do not. Deep tiles with 8 to 64 columns (the problem's
rows, with swapped operands) waste few multiplications while weights are read.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from .operation import FAST_ACCUM, Operation, bytes_of

Kind = Literal["pingpong", "cooperative", "stream_k"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """CUTLASS types of a schedule, and its label in CUTLASS's names."""

    label: str
    kernel: str
    epilogue: str
    scheduler: str


def _schedule(label: str, kind: str, scheduler: str) -> Schedule:
    return Schedule(
        label=label,
        kernel=f"cutlass::gemm::KernelTmaWarpSpecialized{kind}",
        epilogue=f"cutlass::epilogue::TmaWarpSpecialized{kind.removesuffix('Pingpong')}",
        scheduler=scheduler,
    )


KINDS: dict[Kind, Schedule] = {
    "pingpong": _schedule("warpspecialized_pingpong", "Pingpong", "Default"),
    "cooperative": _schedule("warpspecialized_cooperative", "Cooperative", "Default"),
    "stream_k": _schedule("stream_k_warpspecialized_cooperative", "Cooperative", "StreamK"),
}
"""Schedules by kind."""
LINE_BYTES = 128
"""Unit of a tile's depth: bytes of a row in TMA's widest swizzle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile of ``rows`` × ``cols``, ``lines`` × 128 bytes deep. Its block is one of a cluster of ``cluster`` rows × columns."""

    kind: Kind
    rows: int
    cols: int
    lines: int
    cluster: tuple[int, int]

    def depth(self, element_bytes: int) -> int:
        return self.lines * LINE_BYTES // element_bytes

    @classmethod
    def of(cls, operation: Operation) -> "Tile | None":
        """Return the tile of ``operation``, or None if its schedule or depth is not one of ours."""
        lines, rest = divmod(operation.tile[2] * bytes_of(operation.multiplied), LINE_BYTES)
        schedules = (operation.kernel_schedule.removesuffix(FAST_ACCUM), operation.epilogue_schedule, operation.scheduler)
        for kind, schedule in KINDS.items():
            if schedules == (schedule.kernel, schedule.epilogue, schedule.scheduler) and rest == 0:
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
        *_tiles("pingpong", "64x8x2:1x1 64x16x2:1x1 64x32x2:1x1 64x64x2:1x1 64x256x1:2x1"),
        *_tiles("cooperative", "128x128x1:2x1"),
        *_tiles("stream_k", "128x16x2:1x1 128x64x2:1x1 128x128x1:1x2 128x256x1:2x1"),
    )
)
"""Tiles that a search tries first if the first operand is converted in registers."""


def is_shared(operation: Operation) -> bool:
    return Tile.of(operation) in (SHARED_CONVERTING if operation.converts else SHARED)


def own_operations(found: Iterable[Operation]) -> Iterator[Operation]:
    """Yield TILES for every combination of elements and layouts among ``found`` that loads and stores through TMA."""
    models: dict[tuple[str, ...], Operation] = {}
    for op in sorted(found, key=lambda op: op.c != "void"):
        if op.tma_store and op.introduced == 90:
            models.setdefault((op.a, op.b, op.d, op.accumulator, op.layout_a, op.layout_b, op.layout_d), op)
    for model in models.values():
        yield from tiled(model, TILES)


def tiled(model: Operation, tiles: Iterable[Tile], *, fast_accum: bool = False) -> Iterator[Operation]:
    """Yield ``model`` with each of ``tiles``, in the tile's schedule. ``fast_accum`` is for sums of 8-bit floats."""
    suffix, named = (FAST_ACCUM, "_fp8_fastaccum") if fast_accum else ("", "")
    for tile in tiles:
        schedule = KINDS[tile.kind]
        sizes = (tile.rows, tile.cols, tile.depth(bytes_of(model.multiplied)))
        cluster = (*tile.cluster, 1)
        yield dataclasses.replace(
            model, name=_name(model, sizes, cluster, schedule.label + named), tile=sizes, cluster=cluster,
            kernel_schedule=schedule.kernel + suffix, epilogue_schedule=schedule.epilogue, scheduler=schedule.scheduler,
        )  # fmt: skip


def _name(model: Operation, tile: tuple[int, ...], cluster: tuple[int, ...], label: str) -> str:
    """Return the name of an operation by CUTLASS's scheme."""
    sizes = "_".join("x".join(map(str, values)) for values in (tile, cluster))
    elements = "_".join((model.a, model.b, model.accumulator, model.c, model.d))
    layouts = model.layout_a + model.layout_b + model.layout_d
    return f"cutlass3x_sm90_tensorop_gemm_{elements}_{sizes}_0_{layouts}_align{model.alignment_a}_{label}_epi_tma"
