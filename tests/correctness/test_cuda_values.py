"""Cuda kernels for few rows, run on the CPU thread by thread, with partial tiles and clusters.

Each commit tests a case of one of the seven families.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpp_kernels import needs_compiler
from cuda_cases import (
    BF16,
    F16,
    F32,
    INT4,
    UINT4,
    UINT8,
    addmm,
    biased,
    choice,
    dense_shape,
    gated,
    gemv_shape,
    mixed,
    mm,
    narrow_shape,
    parts_shape,
    skinny_shape,
    stream_shape,
    wgmma_shape,
)
from cuda_kernels_on_cpu import assert_right, kernel
from hard_numbers import HARD, assert_as_in_torch, hard_operands
from rotation import rotated

from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.problem import Layout, Problem
from gemmtune.selector.some_rows import RowBits

SMALL, BY_K, WIDE = skinny_shape(8, 32, 2, 2, 1), skinny_shape(8, 16, 2, 1, 4), skinny_shape(16, 32, 1, 1, 2)

CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "int4-group-32": (INT4 | {"scales": "group_32"}, BY_K, {}),
    "int4-group-64-zeros": (INT4 | {"scales": "group_64", "zeros": True}, BY_K, {}),
    "uint4-group-32-zeros-wide": (UINT4 | {"scales": "group_32", "zeros": True, "scale_dtype": F32}, WIDE, {}),
    "uint4-column-zeros": (UINT4 | {"scales": "column", "zeros": True}, SMALL, {}),
    "int4-bfloat16": (INT4 | {"dtype": BF16, "scales": "group_64"}, WIDE, {}),
    "uint4-bfloat16-zeros": (UINT4 | {"dtype": BF16, "scales": "group_128", "zeros": True}, SMALL, {}),
    "int8-column": ({"scales": "column"}, BY_K, {}),
    "int8-group-32-zeros": ({"scales": "group_32", "zeros": True}, WIDE, {}),
    "int8-group-128": ({"scales": "group_128", "scale_dtype": F32}, BY_K, {}),
    "uint8-tensor-zeros": ({"dtype_b": UINT8, "scales": "tensor", "zeros": True}, WIDE, {}),
    "int8-bfloat16": ({"dtype": BF16, "scales": "column"}, SMALL, {}),
    "uint8-bfloat16": ({"dtype": BF16, "dtype_b": UINT8, "scales": "group_64"}, BY_K, {}),
    "int4-group-128-two-blocks": (INT4 | {"scales": "group_128"}, SMALL, {"cluster_k": 2}),
    "int8-row-major-prepacked": ({"scales": "group_64", "layout": "nn"}, BY_K, {}),
    "int8-group-32-three-blocks-interleaved": ({"scales": "group_32"}, BY_K, {"cluster_k": 3, "interleaved_k": True}),
}


def skinny(fields: dict[str, Any], shape: Any, told: dict[str, Any]) -> CudaChoice:
    k = 3 * (256 if "encoding" in fields else 128) - 96
    problem = Problem.mixed_mm(shape.block_m - 3, shape.block_n + 8, k, device_type="cuda", **fields)
    problem = dataclasses.replace(problem, prepacked=fields.get("layout") == "nn")
    if fields == {"scales": "column"}:
        problem = gated(problem)
    if fields == {"dtype": BF16, "scales": "column"}:
        problem = biased(problem)
    return choice(problem, shape, **told)


TILE, ONE_GROUP, TWO_TILES = wgmma_shape(40, 2, 1, 64, 2), wgmma_shape(24, 1, 1, 128, 2), wgmma_shape(16, 2, 2, 64, 3)
MORE_ROWS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "int4-group-128": (INT4 | {"dtype": BF16, "scales": "group_128"}, TILE, {}),
    "int4-group-32-zeros": (INT4 | {"scales": "group_32", "zeros": True}, ONE_GROUP, {}),
    "uint4-column-zeros": (UINT4 | {"dtype": BF16, "scales": "column", "zeros": True}, TWO_TILES, {}),
    "uint4-group-64-two-blocks": (UINT4 | {"scales": "group_64", "scale_dtype": F32}, TILE, {"cluster_k": 2}),
    "int8-column-gated": ({"scales": "column"}, ONE_GROUP, {}),
    "int8-group-64-zeros": (
        {"dtype": BF16, "scales": "group_64", "zeros": True},
        ONE_GROUP,
        {"cluster_k": 3, "interleaved_k": True},
    ),
    "uint8-tensor": ({"dtype_b": UINT8, "scales": "tensor"}, TWO_TILES, {}),
}


def wgmma(fields: dict[str, Any], shape: Any, told: dict[str, Any]) -> CudaChoice:
    problem = mixed(shape.block_m - 3, shape.block_n + 8, 288, **fields)
    return choice(gated(problem) if fields == {"scales": "column"} else problem, shape, **told)


STREAM, WIDE_STREAM, THIRD_STREAM = stream_shape(32, 2, 1, 64, 2), stream_shape(32, 2, 2, 64, 3), stream_shape(32, 3, 1, 64, 2)
PERSISTENT: dict[str, tuple[Problem, Any, dict[str, Any]]] = {
    "whole-and-divided": (mixed(61, 136, 1056, dtype=BF16, **INT4, scales="group_128"), STREAM, {"blocks": 3}),
    "whole": (mixed(61, 200, 480, **INT4, scales="group_64"), THIRD_STREAM, {"blocks": 3, "whole": True}),
    "two-runs": (mixed(61, 200, 480, **INT4, scales="group_32"), THIRD_STREAM, {"blocks": 3, "whole": True, "runs": 2}),
    "three-runs-biased": (
        biased(mixed(33, 136, 1040, dtype=BF16, scales="column")),
        STREAM,
        {"blocks": 5, "whole": True, "runs": 3},
    ),
    "many-helpers": (mixed(29, 136, 1568, **UINT4, scales="group_32", zeros=True), STREAM, {"blocks": 7}),
    "uint4-column-zeros": (mixed(40, 136, 1056, dtype=BF16, **UINT4, scales="column", zeros=True), WIDE_STREAM, {"blocks": 5}),
    "int8-column-gated": (gated(mixed(70, 200, 656, scales="column")), THIRD_STREAM, {"blocks": 5}),
    "int8-biased": (biased(mixed(33, 136, 560, dtype=BF16, scales="group_64", zeros=True)), STREAM, {"blocks": 8}),
    "few-steps": (mixed(9, 72, 192, dtype_b=UINT8, scales="tensor"), STREAM, {"blocks": 132}),
}
"""Cases with whole and divided tiles in both orders, runs, one and more helpers, remainders, all weights, and epilogues."""


def wgmma_stream(problem: Problem, shape: Any, told: dict[str, Any]) -> CudaChoice:
    return choice(problem, shape, pdl=True, prefetch_stages=shape.stages, **told)


DENSE_PERSISTENT: dict[str, tuple[Problem, Any, dict[str, Any]]] = {
    "shared-tiles": (mm(61, 131, 1096), dense_shape(64, 40), {"blocks": 8}),
    "swapped-gated": (gated(mm(70, 72, 520, dtype=F16)), dense_shape(64, 32, 1, 2), {"blocks": 4, "swap_ab": True}),
    "whole-added": (addmm(77, 200, 520), dense_shape(64, 32, 2, 1), {"blocks": 6, "whole": True}),
}
"""Cases with shared and whole tiles, clusters of two along both sides, and results as rows and as columns of a tile."""


TWO, DEEP, PAIR = gemv_shape(8, 2, 2), gemv_shape(8, 4, 1), gemv_shape(16, 2, 2)
ONE_TO_FOUR: dict[str, tuple[Problem, Any]] = {
    "bfloat16": (mm(1, 20, 328), TWO),
    "float16-four-rows": (mm(4, 9, 264, dtype=F16), PAIR),
    "added-bias": (addmm(3, 13, 136, dtype=BF16), DEEP),
    "float32-gated": (biased(mm(2, 11, 72)), TWO),
    "int4-group-128": (mixed(1, 11, 736, **INT4, scales="group_128"), TWO),
    "int4-group-128-bfloat16-two-tiles": (mixed(3, 21, 544, dtype=BF16, **INT4, scales="group_128", scale_dtype=F32), PAIR),
    "int4-group-64": (mixed(2, 10, 544, **INT4, scales="group_64"), TWO),
    "int4-group-32-zeros": (mixed(4, 9, 288, **INT4, scales="group_32", zeros=True), DEEP),
    "uint4-column-zeros": (mixed(2, 11, 416, **UINT4, scales="column", zeros=True), PAIR),
    "uint4-bfloat16-group-128-zeros": (mixed(1, 12, 544, dtype=BF16, **UINT4, scales="group_128", zeros=True), TWO),
    "int8-column": (gated(mixed(4, 11, 528, scales="column")), TWO),
    "int8-bfloat16-column": (mixed(1, 18, 272, dtype=BF16, scales="column"), PAIR),
    "int8-group-32-zeros": (mixed(3, 9, 208, scales="group_32", zeros=True), DEEP),
    "int4-group-128-zeros-of-32": (
        dataclasses.replace(mixed(2, 9, 544, **INT4, scales="group_128", zeros=True), zero_b=Layout.contiguous((17, 9), F16)),
        TWO,
    ),
    "uint8-tensor-zeros": (mixed(2, 9, 272, dtype_b=UINT8, scales="tensor", zeros=True), TWO),
    "int8-bare": (mixed(1, 9, 16), TWO),
    "uint4-row-major-prepacked": (dataclasses.replace(mixed(2, 11, 416, layout="nn", **UINT4), prepacked=True), PAIR),
    "bfloat16-row-major-prepacked": (dataclasses.replace(mm(2, 9, 264, "nn"), prepacked=True), TWO),
    "bfloat16-three-tiles-a-block": (mm(1, 300, 200), TWO),
    "int4-three-tiles-a-block": (gated(mixed(2, 301, 544, **INT4, scales="group_64")), gemv_shape(8, 1, 2)),
    "uint4-zeros-two-tiles-a-block": (mixed(1, 270, 160, **UINT4, scales="column", zeros=True), gemv_shape(8, 4, 2)),
    "int4-zeros-two-tiles-a-block": (mixed(1, 530, 96, **INT4, scales="group_32", zeros=True), PAIR),
}
"""Cases with all weights and row counts, remainders of columns and K, more or fewer lines than stages, and walks over tiles."""


FEW_ROWS: dict[str, tuple[Problem, Any]] = {
    "bfloat16": (mm(3, 40, 328), narrow_shape(8, 16, 2)),
    "float16-tiles-of-rows": (mm(21, 50, 264, dtype=F16), narrow_shape(16, 32, 3)),
    "added-bias": (addmm(13, 24, 904), narrow_shape(24, 16, 2, 256)),
    "float32-biased": (biased(mm(30, 33, 72)), narrow_shape(32, 32, 3, warps_m=2)),
    "gated": (gated(mm(41, 72, 520)), narrow_shape(48, 64, 2, warps_m=2)),
    "row-major-prepacked": (dataclasses.replace(mm(9, 24, 264, "nn"), prepacked=True), narrow_shape(16, 16, 2)),
}
"""Cases with one and more warps along both sides, remainders of all sizes, and more or fewer steps than stages."""


def gemv(problem: Problem, shape: Any, **told: Any) -> CudaChoice:
    return choice(problem, shape, pdl=True, prefetch_stages=shape.stages, **told)


def on_few(problem: Problem, shape: Any) -> CudaChoice:
    """Return the choice for a device of one multiprocessor, whose blocks walk over tiles."""
    return gemv(problem, shape, multiprocessors=1)


ROW_OF_TILES, NARROW, DIVIDED = parts_shape(64, 32, 3), parts_shape(128, 16, 2), parts_shape(64, 16, 2, 2)
HALVES, KEEPING = parts_shape(64, 32, 3, halves=2), parts_shape(64, 32, 2, keeps=True)
BY_PARTS: dict[str, tuple[Problem, Any, dict[str, Any]]] = {
    "nt": (mm(70, 40, 104, dtype=F32), ROW_OF_TILES, {}),
    "nt-from-tile-to-tile": (mm(70, 70, 68, dtype=F32), HALVES, {"blocks": 2}),
    "nn-swapped": (mm(20, 72, 68, "nn", dtype=F32), ROW_OF_TILES, {"swap_ab": True}),
    "tn": (mm(72, 17, 96, "tn", dtype=F32), NARROW, {}),
    "unaligned": (mm(67, 33, 175, dtype=F32), HALVES, {}),
    "kept-sums": (mm(9, 33, 1090, dtype=F32), KEEPING, {"blocks": 1}),
    "two-blocks": (addmm(9, 17, 328, dtype=F32), DIVIDED, {}),
    "batched-swapped": (Problem.bmm(2, 9, 65, 70, dtype=F32, layout="tt", device_type="cuda"), ROW_OF_TILES, {"swap_ab": True}),
    "gated": (gated(mm(33, 20, 104, dtype=F32)), DIVIDED, {}),
    "prepacked": (dataclasses.replace(mm(20, 21, 100, dtype=F32), prepacked=True), ROW_OF_TILES, {}),
}
"""Cases with all majors, remainders of all sizes, persistent blocks, clusters, copies, and planes packed by torch."""


def by_parts(problem: Problem, shape: Any, told: dict[str, Any]) -> CudaChoice:
    return choice(problem, shape, **told)


KERNELS: dict[str, tuple[Callable[..., CudaChoice], dict[str, tuple[Any, ...]]]] = {
    "skinny": (skinny, CASES), "wgmma": (wgmma, MORE_ROWS), "gemv": (on_few, ONE_TO_FOUR), "parts": (by_parts, BY_PARTS),
    "wgmma_stream": (wgmma_stream, PERSISTENT), "narrow": (gemv, FEW_ROWS), "stream": (wgmma_stream, DENSE_PERSISTENT),
}  # fmt: skip
PICKED = [
    (kind, name) for kind in rotated([*KERNELS], 7, "kinds") for name in rotated([*KERNELS[kind][1]], len(KERNELS[kind][1]), kind)
]


@pytest.mark.turn(2, 3)
@needs_compiler
@pytest.mark.parametrize(("kind", "name"), PICKED)
def test_results_pass_verification(kind: str, name: str) -> None:
    made, cases = KERNELS[kind]
    assert_right(made(*cases[name]))


@pytest.mark.turn(0, 3)
@needs_compiler
def test_hard_to_split_numbers_match_torch() -> None:
    problem = mm(len(HARD), len(HARD) + 1, 72, dtype=F32)
    a, b = hard_operands(problem, torch.device("cpu"))
    out, again = (torch.empty(problem.out.size) for _ in range(2))
    kernel(choice(problem, DIVIDED)).run(out, (a, b), ())
    assert_as_in_torch(out, a, b)
    packed = choice(dataclasses.replace(problem, prepacked=True), DIVIDED)
    kernel(packed).run(again, (a, packed.pack(b)), ())
    assert torch.equal(again.nan_to_num(7.0), out.nan_to_num(7.0)), "torch makes the same planes"


@pytest.mark.turn(1, 3)
@needs_compiler
@pytest.mark.parametrize("blocks", rotated([2, 3], 2, "blocks that divide K"))
def test_the_place_of_a_row_shows_from_three_blocks_on(blocks: int) -> None:
    """Each block of a cluster finishes some rows of a tile, beginning with its own sums. Two sums commute, three do not."""

    def made(m: int) -> CudaChoice:
        return choice(mixed(m, 128, 288, scales="column"), ONE_GROUP, cluster_k=blocks)

    bits = RowBits(made(40), torch.device("cpu"), kernel)
    assert made(40).batch_invariant == (bits.difference([made(m) for m in (21, 40, 29)]) is None) == (blocks == 2)
