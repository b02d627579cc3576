"""Operations of our own for few rows: CUTLASS's generator makes no tile of 64 rows with few columns, nor a deep one.

With operands exchanged, the rows of a problem are the columns of a tile: 16 to 64 of them, so that a multiprocessor reads weights
with every byte of its bandwidth and multiplies next to nothing in vain. Named by CUTLASS's scheme.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from .operation import Operation

__all__ = ["small_operations"]

TILES = ((64, 16, 128), (64, 16, 256), (64, 32, 128), (64, 32, 256), (64, 64, 128), (128, 16, 128), (128, 32, 128), (128, 64, 128))
CLUSTERS = ((1, 1, 1), (2, 1, 1))
SCHEDULES = {
    "warpspecialized_pingpong": (
        "cutlass::gemm::KernelTmaWarpSpecializedPingpong", "cutlass::epilogue::TmaWarpSpecialized", "Default",
    ),
    "stream_k_warpspecialized_cooperative": (
        "cutlass::gemm::KernelTmaWarpSpecializedCooperative", "cutlass::epilogue::TmaWarpSpecializedCooperative", "StreamK",
    ),
}  # fmt: skip
LEAST_COOPERATIVE_ROWS = 128
"""Two warp groups share a tile of the cooperative schedule, 64 rows each at the least."""


def small_operations(found: Iterable[Operation]) -> Iterator[Operation]:
    """Tiles of our own for every combination of elements and layouts among ``found``, of operations that store through TMA."""
    models: dict[tuple[str, ...], Operation] = {}
    for op in found:
        if op.tma_store and op.introduced == 90:
            models.setdefault((op.a, op.b, op.c, op.d, op.accumulator, op.layout_a, op.layout_b, op.layout_d), op)
    for model in models.values():
        for tile in TILES:
            for cluster in CLUSTERS:
                for label, (kernel, epilogue, scheduler) in SCHEDULES.items():
                    if "cooperative" not in label or tile[0] >= LEAST_COOPERATIVE_ROWS:
                        yield dataclasses.replace(
                            model, name=_name(model, tile, cluster, label), tile=tile, cluster=cluster,
                            kernel_schedule=kernel, epilogue_schedule=epilogue, scheduler=scheduler,
                        )  # fmt: skip


def _name(model: Operation, tile: tuple[int, ...], cluster: tuple[int, ...], label: str) -> str:
    sizes = ["x".join(map(str, values)) for values in (tile, cluster)]
    elements = "_".join((model.a, model.b, model.accumulator, model.c, model.d))
    layouts = model.layout_a + model.layout_b + model.layout_d
    return f"cutlass3x_sm90_tensorop_gemm_{elements}_{sizes[0]}_{sizes[1]}_0_{layouts}_align{model.alignment_a}_{label}_epi_tma"
