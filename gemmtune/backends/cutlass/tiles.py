"""Operations of our own: CUTLASS's collective builders take more tiles than its generator lists.

The generator lists powers of two: tiles 128 bytes deep, with at least 16 columns and, but for 256 columns, at least 128 rows.
Measured on an H200, an operation of ours was the fastest for 12 of 18 bfloat16 products of all proportions, by 3 to 30%:
tiles with 192 rows or columns fill whole waves of multiprocessors for many products for which 128 and 256 do not, and deep
tiles with 8 to 64 columns (the rows of a problem whose operands are swapped) multiply next to nothing in vain while weights
are read.
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
    """CUTLASS's types, and what its names say of them."""

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
"""The sliced ones are main loop and epilogue of one warp group in a kernel of ours, in which so many of them share a tile."""
LINE_BYTES = 128
"""The unit of a tile's depth: what TMA's widest swizzle has of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A tile of ``rows`` × ``cols``, ``lines`` × 128 bytes deep, whose block is one of a cluster of ``cluster`` rows × columns.

    Half a line is 32 elements of two bytes, as deep as the smallest group of weights that shares a scale.
    """

    kind: Kind
    rows: int
    cols: int
    lines: float
    cluster: tuple[int, int]

    def depth(self, element_bytes: int) -> int:
        """Elements along K."""
        return int(self.lines * LINE_BYTES) // element_bytes

    @property
    def halved(self) -> Tile:
        """The same with half a line."""
        return dataclasses.replace(self, lines=0.5)

    @classmethod
    def of(cls, operation: Operation) -> Tile | None:
        """What ``operation`` is; None where it is nothing that we would make: its schedule or its depth is another."""
        lines = operation.tile[2] * bytes_of(operation.multiplied, 1) / LINE_BYTES
        kernel = operation.kernel_schedule.removesuffix(FAST_ACCUM).removesuffix(BLOCKWISE)
        schedules = (kernel, operation.epilogue_schedule, operation.scheduler, operation.slices)
        for kind, schedule in KINDS.items():
            if schedules == (schedule.kernel, schedule.epilogue, schedule.scheduler, schedule.slices) and 2 * lines % 1 == 0:
                rows, cols, _ = operation.tile
                return cls(kind=kind, rows=rows, cols=cols, lines=lines, cluster=operation.cluster[:2])
        return None


def _tiles(kind: Kind, text: str) -> tuple[Tile, ...]:
    """``64x16x2:1x1,2x1`` is a tile of 64 rows, 16 columns and 2 lines, in clusters of one block and of two."""
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
"""Those that were the fastest for some product, or near it, and the same in other clusters. In clusters of four only where few rows
are read again by each tile of weights, which four then share (4 to 7% at 16 and 64 rows): their number does not divide that of the
multiprocessors of every part of a GPU, so that some stay idle."""

SLICED: tuple[Tile, ...] = (
    *_tiles("sliced2", "64x8x2:1x1 64x16x2:1x1 64x32x2:1x1 64x64x2:1x1"),
    *_tiles("sliced3", "64x16x2:1x1"),
)
"""Tiles of few columns, where weights are read once: all warp groups of a multiprocessor convert them."""

GROUPED: tuple[Tile, ...] = (
    *_tiles("pingpong", "64x128x1:1x1,2x1 128x128x1:1x1,2x1"),
    *_tiles("cooperative", "128x256x1:1x1,2x1 256x128x1:2x1"),
)
"""Tiles of groups of rows …"""
GROUPED_SWAPPED: tuple[Tile, ...] = _tiles("pingpong", "64x16x2:1x1 64x32x2:1x1 128x64x1:1x1")
"""… and where the rows of a group, few of them, are columns."""

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
"""What a search tries first, so that problems share compilations. Of 72 operations measured on 18 products, each time the one
was added that brought the fastest of the set closest to the fastest of all on average: 16 are within 0.1% of it. Three more
are near the fastest for large products, whose order changes from run to run with the clocks, and one serves 64 rows."""


SHARED_CONVERTING: frozenset[Tile] = frozenset(
    (
        *SLICED,
        *_tiles("pingpong", "64x8x2:1x1 64x16x2:1x1 64x32x2:1x1 64x64x2:1x1 64x256x1:2x1"),
        *_tiles("cooperative", "128x128x1:2x1"),
        *_tiles("stream_k", "128x16x2:1x1 128x64x2:1x1 128x128x1:1x2 128x256x1:2x1"),
    )
)
"""The same where the first operand is converted in registers."""
SHARED_HALVED = frozenset(tile.halved for tile in SHARED_CONVERTING - frozenset(SLICED))
"""The same for groups of 32 weights."""


def is_shared(operation: Operation) -> bool:
    """Says whether the tile is one of those that a search tries first."""
    return Tile.of(operation) in (SHARED_CONVERTING | SHARED_HALVED if operation.converts else SHARED)


def own_operations(found: Iterable[Operation]) -> Iterator[Operation]:
    """TILES for every combination of elements and layouts among ``found``, of operations that load and store through TMA."""
    models: dict[tuple[str, ...], Operation] = {}
    for op in sorted(found, key=lambda op: op.c != "void"):
        if op.tma_store and op.introduced == 90:
            models.setdefault((op.a, op.b, op.d, op.accumulator, op.layout_a, op.layout_b, op.layout_d), op)
    for model in models.values():
        yield from tiled(model, TILES)


SUFFIXES = {"": "", FAST_ACCUM: "_fp8_fastaccum", BLOCKWISE: "_fp8_blockwise"}
"""What CUTLASS's names say of what follows the name of a schedule."""


def tiled(model: Operation, tiles: Iterable[Tile], suffix: str = "") -> Iterator[Operation]:
    """``model`` with each of ``tiles``, in the tile's schedule with ``suffix``."""
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
    """The name of an operation by CUTLASS's scheme."""
    sizes = "_".join("x".join(map(str, values)) for values in (tile, cluster))
    scales = [f"{x.extent}x{SCALE_BLOCK}f32x" if x else "" for x in (model.scales_a, model.scales_b)]
    if model.weights:
        scales[0] = f"{model.weights.element}{'z' if model.weights.zero else ''}x"
    elements = "_".join((scales[0] + model.a, scales[1] + model.b, model.accumulator, model.c, model.d))
    layouts = model.layout_a + model.layout_b + model.layout_d
    kind = "gemm_grouped" if model.grouped else "gemm"
    shuffled = "_shuffled" if model.shuffled else ""
    return f"cutlass3x_sm90_tensorop_{kind}_{elements}_{sizes}_0_{layouts}_align{model.alignment_a}_{label}_epi_tma{shuffled}"
