"""Cuda families on a GPU: verification of shapes, majors, weights and epilogues, captures, streams, overlapping launches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cuda_cases import (
    BF16,
    F16,
    F32,
    INT4,
    UINT4,
    UINT8,
    addmm,
    biased,
    bmm,
    by_columns,
    choice,
    cluster_shape,
    dense_shape,
    gated,
    gemv_shape,
    legal_choices,
    mixed,
    mm,
    narrow_shape,
    parts_shape,
    skinny_shape,
    stream_shape,
    wgmma_shape,
)
from hard_numbers import HARD, assert_as_in_torch, hard_operands
from launches import GPU, assert_launched_by_a_new_thread, assert_replayable, assert_right, assert_streams_apart, call

from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.backends.cuda.cluster.configs import Shape as ClusterShape
from gemmtune.backends.cuda.gemv.family import Shape as GemvShape
from gemmtune.backends.cuda.narrow.family import Shape as NarrowShape
from gemmtune.backends.cuda.parts.configs import Shape as PartsShape
from gemmtune.backends.cuda.stream.configs import Shape as DenseShape
from gemmtune.backends.cuda.wgmma_stream.family import Shape as StreamShape
from gemmtune.device import detect
from gemmtune.errors import ErrorFromChoice
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernels run on SM90 alone"
    ),
]

Make = Callable[[int], Problem]
"""Function that returns a problem with a given K."""


def cluster(text: str) -> ClusterShape:
    return cluster_shape(text)


CASES: dict[str, tuple[Make, int, Any]] = {
    "two-tiles": (lambda k: mm(64, 100, k), 65536, cluster("64x64x64_s12_k2")),
    "three-tiles": (lambda k: mm(64, 136, k), 16392, cluster("64x64x64_s12_k2")),
    "small": (lambda k: mm(64, 64, k), 65536, cluster("64x64x64_s6_k8")),
    "small-of-4": (lambda k: mm(13, 100, k, dtype=F16), 16392, cluster("64x64x64_s6_k4")),
    "shared": (lambda k: mm(100, 72, k, dtype=F16), 16392, cluster("64x64x128_s6_k2_2x2")),
    "shared-not-by-k": (lambda k: mm(104, 136, k, "tn"), 8200, cluster("64x64x128_s6_k2_2x2")),
    "shared-two-steps": (lambda k: mm(100, 100, k), 256, cluster("64x64x128_s6_k2_2x2")),
    "divided": (lambda k: mm(128, 128, k), 65536, cluster("64x64x64_s6_k2_2x2")),
    "divided-tails": (lambda k: addmm(136, 200, k), 8200, cluster("64x64x64_s6_k2_2x2")),
    "divided-beyond-the-edge": (lambda k: mm(136, 264, k), 8200, cluster("64x64x64_s6_k2_2x2")),
    "divided-batched": (lambda k: bmm(3, 100, 72, k), 4104, cluster("64x64x64_s6_k2_2x2")),
    "divided-a-not-by-k": (lambda k: bmm(2, 104, 136, k, "tt"), 2056, cluster("64x64x64_s6_k2_2x2")),
    "beside-b-not-by-k": (lambda k: mm(200, 136, k, "nn", F16), 8200, cluster("128x64x64_s8_k2_1x2")),
    "beside-tails": (lambda k: addmm(200, 136, k, "nt", BF16, "mn"), 8200, cluster("128x64x64_s8_k2_1x2")),
    "four-tiles": (lambda k: mm(256, 256, k), 16384, cluster("128x64x64_s8_k1_2x2")),
    "four-tiles-not-by-k": (lambda k: mm(200, 136, k, "tn", F16), 8200, cluster("128x64x64_s8_k1_2x2")),
    "four-tiles-short": (lambda k: mm(136, 100, k), 520, cluster("128x64x64_s8_k1_2x2")),
    "96-columns": (lambda k: addmm(100, 100, k), 16392, cluster("64x96x64_s10_k4_2x1")),
    "16-columns": (lambda k: mm(13, 4096, k), 8200, cluster("64x16x128_s5_k2")),
    "32-columns": (lambda k: gated(mm(24, 264, k)), 8200, cluster("64x32x128_s4_k2")),
    "weights-of-16": (lambda k: addmm(13, 1000, k, "nt", BF16, "mn"), 2056, cluster("128x16x64_s6_k2")),
    "weights-of-32": (lambda k: bmm(2, 24, 264, k, "nn"), 2056, cluster("128x32x64_s5_k2")),
    "fused": (lambda k: gated(mm(100, 136, k)), 16392, cluster("64x64x64_s12_k2")),
    "one-run-of-16": (lambda k: mm(13, 1000, k), 8200, cluster("64x16x128_s10_k1")),
    "one-run-of-32": (lambda k: addmm(100, 264, k), 4104, cluster("64x32x128_s8_k1")),
    "one-run-of-48": (lambda k: mm(96, 520, k, "nt"), 4104, cluster("64x48x128_s7_k1_1x2")),
    "one-run-of-48-stacked": (lambda k: mm(90, 264, k, dtype=F16), 2056, cluster("64x48x128_s7_k1_2x1")),
    "one-run-of-64": (lambda k: bmm(2, 72, 136, k, "tt", F16), 2056, cluster("64x64x128_s6_k1")),
    "one-run-beside": (lambda k: mm(72, 264, k, dtype=F16), 4104, cluster("64x32x128_s8_k1_1x2")),
    "one-run-stacked": (lambda k: addmm(136, 264, k, "nt", BF16, "mn"), 4104, cluster("64x32x128_s8_k1_2x1")),
    "one-run-short": (lambda k: mm(136, 100, k), 136, cluster("64x16x128_s10_k1_1x2")),
    "narrow-one-row": (lambda k: mm(1, 1000, k), 7168, narrow_shape(8, 16, 4, 512)),
    "narrow-three-blocks": (lambda k: mm(8, 6000, k), 4104, narrow_shape(8, 16, 6, 256)),
    "narrow-four-blocks": (lambda k: addmm(5, 264, k), 2056, narrow_shape(8, 16, 4, 256)),
    "narrow-16-rows": (lambda k: addmm(13, 264, k), 4104, narrow_shape(16, 16, 7, 256, 2)),
    "narrow-tiles-of-rows": (lambda k: mm(61, 1003, k, dtype=F16), 2056, narrow_shape(24, 16, 5, 512, 3)),
    "narrow-wide": (lambda k: biased(mm(40, 520, k)), 1040, narrow_shape(48, 64, 4, 256, 2)),
    "narrow-fused": (lambda k: gated(mm(64, 264, k)), 136, narrow_shape(64, 16, 5, 256, 4)),
    "narrow-prepacked": (
        lambda k: dataclasses.replace(mm(30, 520, k, "nn"), prepacked=True), 4096, narrow_shape(32, 32, 7, 256, 2)
    ),
    "gemv-one-row": (lambda k: mm(1, 1000, k), 4096, gemv_shape(8, 4, 8)),
    "gemv-four-rows": (lambda k: mm(4, 1003, k, dtype=F16), 4104, gemv_shape(16, 2, 8)),
    "gemv-more-warps": (lambda k: mm(2, 77, k), 14344, gemv_shape(8, 2, 16)),
    "gemv-biased": (lambda k: addmm(3, 131, k, dtype=BF16), 2056, gemv_shape(16, 4, 4)),
    "gemv-fused": (lambda k: gated(mm(1, 264, k)), 136, gemv_shape(8, 8, 4)),
    "gemv-int4": (lambda k: mixed(1, 1000, k, **INT4, scales="group_128"), 4096, gemv_shape(8, 4, 4)),
    "gemv-int4-two-tiles": (lambda k: mixed(3, 1003, k, **INT4, scales="group_128"), 14368, gemv_shape(16, 2, 8)),
    "gemv-int4-zeros": (lambda k: mixed(4, 256, k, **INT4, scales="group_32", zeros=True), 2048, gemv_shape(8, 4, 8)),
    "gemv-uint4-bfloat16": (
        lambda k: mixed(2, 264, k, dtype=BF16, **UINT4, scales="group_64", zeros=True), 3008, gemv_shape(8, 2, 16)
    ),
    "gemv-uint4-column": (lambda k: mixed(1, 100, k, **UINT4, scales="column", zeros=True), 4096, gemv_shape(16, 4, 8)),
    "gemv-float32-scales": (
        lambda k: mixed(1, 264, k, **INT4, scales="group_128", scale_dtype=F32), 4096, gemv_shape(8, 8, 4)
    ),
    "gemv-int8": (lambda k: mixed(1, 77, k, scales="column"), 2064, gemv_shape(8, 4, 8)),
    "gemv-int8-groups": (lambda k: mixed(4, 520, k, scales="group_32", zeros=True), 2080, gemv_shape(16, 4, 4)),
    "gemv-uint8": (lambda k: mixed(2, 520, k, dtype_b=UINT8, scales="tensor", zeros=True), 4096, gemv_shape(8, 2, 8)),
    "gemv-int8-biased": (lambda k: biased(mixed(3, 131, k, dtype=BF16, scales="column")), 4096, gemv_shape(16, 2, 8)),
    "skinny-int8-row-major-prepacked": (
        lambda k: dataclasses.replace(mixed(16, 520, k, layout="nn", scales="group_32"), prepacked=True), 2080,
        skinny_shape(16, 64, 4, 1, 4),
    ),
    "skinny-int4": (lambda k: mixed(16, 1000, k, **INT4, scales="group_128"), 4096, skinny_shape(16, 128, 4, 2, 4)),
    "skinny-int4-one-row": (lambda k: mixed(1, 1000, k, **INT4, scales="group_128"), 4096, skinny_shape(8, 64, 8, 2, 4)),
    "skinny-int4-32-rows": (lambda k: mixed(30, 520, k, **INT4, scales="group_128"), 4096, skinny_shape(32, 128, 6, 4, 2)),
    "skinny-int4-zeros": (
        lambda k: mixed(16, 256, k, **INT4, scales="group_32", zeros=True), 2048, skinny_shape(16, 96, 4, 2, 4)
    ),
    "skinny-uint4-bfloat16": (
        lambda k: mixed(8, 264, k, dtype=BF16, **UINT4, scales="group_64", zeros=True), 3008, skinny_shape(8, 64, 4, 2, 4)
    ),
    "skinny-uint4-column": (
        lambda k: mixed(16, 100, k, **UINT4, scales="column", zeros=True), 4096, skinny_shape(16, 128, 4, 2, 2)
    ),
    "skinny-float32-scales": (
        lambda k: mixed(8, 264, k, **INT4, scales="group_128", scale_dtype=F32), 4096, skinny_shape(8, 256, 3, 4, 2)
    ),
    "skinny-int8": (lambda k: mixed(3, 77, k, scales="column"), 2064, skinny_shape(8, 64, 8, 2, 4)),
    "skinny-int8-groups": (lambda k: mixed(16, 520, k, scales="group_32", zeros=True), 2080, skinny_shape(16, 64, 4, 1, 4)),
    "skinny-uint8": (
        lambda k: mixed(16, 520, k, dtype_b=UINT8, scales="tensor", zeros=True), 4096, skinny_shape(16, 64, 4, 2, 4)
    ),
    "skinny-int8-bfloat16": (lambda k: mixed(32, 1000, k, dtype=BF16), 4112, skinny_shape(32, 256, 4, 8, 1)),
    "skinny-fused": (lambda k: gated(mixed(16, 264, k, **INT4, scales="group_128")), 4096, skinny_shape(16, 128, 4, 4, 2)),
    "skinny-biased": (lambda k: biased(mixed(11, 131, k, dtype=BF16, scales="column")), 4096, skinny_shape(16, 64, 4, 2, 4)),
    "wgmma-int8": (lambda k: mixed(256, 1032, k, scales="column"), 2064, wgmma_shape(256, 2, 1, 64, 4)),
    "wgmma-int8-one-group": (
        lambda k: mixed(33, 520, k, scales="column"), 4096, wgmma_shape(64, 1, 1, 128, 4, blocks_per_sm=2)
    ),
    "wgmma-int8-two-tiles": (lambda k: mixed(300, 520, k, scales="tensor"), 4096, wgmma_shape(128, 2, 2, 64, 6)),
    "wgmma-int8-one-row": (lambda k: mixed(1, 131, k), 1040, wgmma_shape(64, 2, 1, 128, 4, k16_batch=2)),
    "wgmma-int8-groups": (lambda k: mixed(70, 520, k, scales="group_32", zeros=True), 2080, wgmma_shape(128, 2, 1, 128, 4)),
    "wgmma-int8-bfloat16": (lambda k: mixed(96, 1000, k, dtype=BF16, scales="group_128"), 4112 - 16, wgmma_shape(96, 2, 1, 128, 5)),
    "wgmma-uint8": (
        lambda k: mixed(130, 520, k, dtype_b=UINT8, scales="tensor", zeros=True), 4096, wgmma_shape(128, 2, 1, 128, 3)
    ),
    "wgmma-int4": (
        lambda k: mixed(64, 1000, k, **INT4, scales="group_128"), 4096, wgmma_shape(64, 2, 1, 128, 4, k16_batch=2)
    ),
    "wgmma-int4-two-tiles": (lambda k: mixed(133, 520, k, **INT4, scales="group_64"), 3008, wgmma_shape(128, 2, 2, 64, 4)),
    "wgmma-uint4-zeros": (
        lambda k: mixed(400, 264, k, **UINT4, scales="group_128", zeros=True), 4064, wgmma_shape(192, 2, 1, 64, 3)
    ),
    "wgmma-uint4": (lambda k: mixed(47, 33, k, **UINT4), 1312, wgmma_shape(64, 2, 1, 64, 4, blocks_per_sm=2)),
    "wgmma-int4-bfloat16": (
        lambda k: mixed(80, 264, k, dtype=BF16, **UINT4, scales="group_64", zeros=True), 4096, wgmma_shape(128, 2, 1, 64, 4)
    ),
    "wgmma-float32-scales": (
        lambda k: mixed(64, 264, k, **INT4, scales="group_128", scale_dtype=F32), 4096, wgmma_shape(64, 2, 1, 128, 4)
    ),
    "wgmma-by-columns": (lambda k: by_columns(mixed(72, 264, k, scales="column")), 2048, wgmma_shape(64, 2, 1, 128, 4)),
    "wgmma-fused": (lambda k: gated(mixed(64, 264, k, **INT4, scales="group_128")), 4096, wgmma_shape(64, 2, 1, 128, 4)),
    "parts": (lambda k: mm(256, 384, k, dtype=F32), 1024, parts_shape(128, 128, 5)),
    "parts-tails": (lambda k: mm(333, 264, k, dtype=F32), 1004, parts_shape(128, 128, 5)),
    "parts-unaligned": (lambda k: mm(301, 131, k, dtype=F32), 999, parts_shape(128, 128, 4, 2)),
    "parts-not-by-k": (lambda k: mm(264, 136, k, "tn", F32), 1000, parts_shape(128, 64, 7)),
    "parts-b-not-by-k": (lambda k: addmm(200, 136, k, "nn", F32), 1028, parts_shape(128, 64, 6, 4)),
    "parts-batched": (lambda k: bmm(3, 100, 200, k, dtype=F32), 320, parts_shape(128, 128, 5)),
    "parts-batched-not-by-k": (lambda k: bmm(2, 104, 136, k, "tt", F32), 2056, parts_shape(128, 64, 6, 8)),
    "parts-16-rows": (lambda k: addmm(16, 1000, k, dtype=F32, bias="mn"), 4096, parts_shape(128, 16, 10, 2)),
    "parts-few-rows": (lambda k: mm(13, 1000, k, dtype=F32), 2048, parts_shape(64, 16, 16, 2)),
    "parts-one-group": (lambda k: mm(100, 72, k, dtype=F32), 16384, parts_shape(64, 64, 9, 8)),
    "parts-short": (lambda k: mm(512, 136, k, dtype=F32), 128, parts_shape(128, 32, 8, 2)),
    "parts-shortest": (lambda k: mm(512, 300, k, dtype=F32), 64, parts_shape(128, 128, 5, halves=2)),
    "parts-halves": (lambda k: mm(300, 520, k, dtype=F32), 1024, parts_shape(128, 128, 5, halves=2)),
    "parts-halves-not-by-k": (lambda k: addmm(300, 520, k, "tt", F32), 1000, parts_shape(128, 112, 5, halves=2)),
    "parts-kept": (lambda k: mm(300, 520, k, dtype=F32), 4100, parts_shape(128, 128, 4, halves=2, keeps=True)),
    "parts-halves-divided": (lambda k: mm(64, 520, k, dtype=F32), 2000, parts_shape(128, 128, 4, 4, halves=2)),
    "parts-fused": (lambda k: gated(mm(200, 136, k, dtype=F32)), 2048, parts_shape(128, 128, 4, 4)),
    "parts-by-columns": (lambda k: by_columns(mm(200, 136, k, dtype=F32)), 512, parts_shape(128, 128, 5)),
    "parts-prepacked": (
        lambda k: dataclasses.replace(mm(200, 141, k, dtype=F32), prepacked=True), 1000, parts_shape(128, 128, 5)
    ),
    "dense-stream": (lambda k: mm(333, 5000, k), 4096, dense_shape(128, 176, 1, 2)),
    "dense-stream-odd": (lambda k: mm(211, 1003, k, dtype=F16), 2088, dense_shape(128, 48, 2, 1)),
    "dense-stream-one-row": (lambda k: mm(1, 5120, k), 4104, dense_shape(128, 64)),
    "dense-stream-192": (lambda k: addmm(520, 1000, k), 2056, dense_shape(192, 112, 1, 2)),
    "dense-stream-64": (lambda k: mm(333, 1000, k), 4104, dense_shape(64, 160, 2, 1)),
    "dense-stream-64-rows": (lambda k: addmm(200, 1003, k), 2056, dense_shape(64, 112, 1, 2)),
    "dense-stream-88": (lambda k: mm(333, 1000, k), 4104, dense_shape(128, 88, 1, 2)),
    "dense-stream-104-fused": (lambda k: gated(mm(211, 1003, k, dtype=F16)), 2056, dense_shape(128, 104)),
    "dense-stream-168-added": (lambda k: addmm(170, 520, k, "nt", BF16, "mn"), 1032, dense_shape(192, 168, 1, 2)),
    "dense-stream-64-not-by-k": (lambda k: mm(136, 2056, k, "nn"), 1032, dense_shape(64, 192)),
    "dense-stream-64-fused": (lambda k: gated(mm(100, 520, k, dtype=F16)), 4096, dense_shape(64, 208)),
    "dense-stream-waves": (lambda k: mm(1000, 6144, k), 1032, dense_shape(128, 256, 2, 1)),
    "dense-stream-short": (lambda k: mm(150, 264, k), 72, dense_shape(128, 32)),
    "dense-stream-a-not-by-k": (lambda k: mm(264, 2056, k, "tn"), 1032, dense_shape(128, 64, 2, 1)),
    "dense-stream-b-not-by-k": (lambda k: mm(136, 2056, k, "nn", F16), 4104, dense_shape(128, 128, 1, 2)),
    "dense-stream-none-by-k": (lambda k: mm(264, 520, k, "tt"), 2056, dense_shape(192, 64)),
    "dense-stream-by-columns": (lambda k: by_columns(mm(200, 1000, k)), 1024, dense_shape(128, 80, 2, 1)),
    "dense-stream-added": (lambda k: addmm(200, 1000, k, "nt", BF16, "mn"), 2056, dense_shape(128, 96, 1, 2)),
    "dense-stream-fused": (lambda k: gated(mm(300, 1032, k)), 4096, dense_shape(128, 160, 2, 1)),
    "dense-stream-biased": (lambda k: biased(mm(512, 131, k)), 1040, dense_shape(128, 128)),
    "stream-int4": (lambda k: mixed(500, 1000, k, dtype=BF16, **INT4, scales="group_128"), 4096, stream_shape(256, 2, 1, 64, 3)),
    "stream-int4-small": (lambda k: mixed(190, 6144, k, **INT4, scales="group_64"), 3008, stream_shape(192, 2, 1, 64, 3)),
    "stream-uint4-zeros": (
        lambda k: mixed(2000, 2056, k, **UINT4, scales="group_128", zeros=True), 2080, stream_shape(256, 2, 1, 64, 3)
    ),
    "stream-int8": (lambda k: mixed(1024, 5120, k, dtype=BF16, scales="column"), 2064, stream_shape(256, 2, 1, 64, 4)),
    "stream-int8-groups": (lambda k: mixed(70, 520, k, scales="group_32", zeros=True), 2080, stream_shape(128, 2, 1, 128, 4)),
    "stream-two-tiles": (lambda k: mixed(133, 520, k, **INT4, scales="group_64"), 3008, stream_shape(128, 2, 2, 64, 3)),
    "stream-by-columns": (lambda k: by_columns(mixed(72, 264, k, scales="column")), 2048, stream_shape(128, 2, 1, 128, 4)),
    "stream-fused": (
        lambda k: gated(mixed(300, 1032, k, dtype=BF16, **INT4, scales="group_128")), 4096, stream_shape(256, 2, 1, 64, 3)
    ),
    "stream-biased": (lambda k: biased(mixed(211, 131, k, dtype=BF16, scales="column")), 1040, stream_shape(192, 2, 1, 64, 4)),
    "wgmma-biased": (lambda k: biased(mixed(211, 131, k, dtype=BF16, scales="column")), 4096, wgmma_shape(128, 2, 1, 128, 4)),
}  # fmt: skip
DIVIDED: list[dict[str, Any]] = [
    {"cluster_k": 1, "pdl": True, "prefetch_stages": 4},
    {"cluster_k": 2, "pdl": True},
    {"cluster_k": 3, "interleaved_k": True},
    {"cluster_k": 4},
]
"""Divisions of K among the blocks of a cluster."""
PERSISTENT: list[dict[str, Any]] = [
    {"whole": True, "pdl": True, "prefetch_stages": 3},
    {"blocks": 7},
    {"blocks": 131, "pdl": True},
    {"pdl": True, "prefetch_stages": 3},
]
"""Numbers of persistent blocks, with whole and with divided tiles."""


DENSE_PERSISTENT = [way | {"swap_ab": swap_ab} for way in PERSISTENT for swap_ab in (False, True)]


def ways_of(name: str) -> list[dict[str, Any]]:
    if isinstance(CASES[name][2], (GemvShape, NarrowShape)):
        return [{}, {"pdl": True}, {"pdl": True, "prefetch_stages": 4}]
    if isinstance(CASES[name][2], PartsShape):
        return [
            {"swap_ab": swap_ab, "pdl": pdl, "blocks": blocks}
            for swap_ab, pdl, blocks in itertools.product((False, True), (False, True), (0, 3))
        ]
    if isinstance(CASES[name][2], StreamShape):
        return PERSISTENT
    if isinstance(CASES[name][2], DenseShape):
        return DENSE_PERSISTENT
    if not isinstance(CASES[name][2], ClusterShape):
        return DIVIDED
    ways = [{}, {"pdl": True, "prefetch_stages": 4}]
    return [{"clusters_per_tile": n, "swap_ab": swap} | way for n, swap, way in itertools.product((1, 3, 15), (False, True), ways)]


def choices_of(name: str, k: int = 0) -> list[CudaChoice]:
    """Return every legal launch variant, with ``k`` in place of the case's K."""
    make, terms, shape = CASES[name]
    return legal_choices(make(k or terms), shape, ways_of(name), detect("cuda"))


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """Compile all kernels of this module, with one thread per core."""
    if not torch.cuda.is_available():
        return
    called = (getattr(item, "callspec", None) for item in request.session.items)
    names = {one.params["name"] for one in called if one is not None and "name" in one.params}
    sources = {one.compile_key: one for name in names & CASES.keys() for one in choices_of(name)}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.compile(), sources.values()))


@pytest.mark.parametrize("name", CASES)
def test_all_launch_variants_pass_verification(name: str) -> None:
    make, k, _ = CASES[name]
    assert_right(make(k), choices_of(name))


OF_EACH = [
    "two-tiles",
    "divided-batched",
    "four-tiles",
    "dense-stream",
    "dense-stream-fused",
    "fused",
    "gemv-int4",
    "gemv-fused",
    "narrow-16-rows",
    "narrow-fused",
    "parts-tails",
    "parts-unaligned",
    "parts-16-rows",
    "skinny-int4",
    "skinny-fused",
    "stream-int4",
    "stream-fused",
    "wgmma-int4",
    "wgmma-fused",
]
"""Sample of every family, with and without sums through memory."""


@pytest.mark.parametrize("name", OF_EACH)
def test_first_call_can_be_captured_and_replayed(name: str) -> None:
    assert_replayable(choices_of(name)[-1])


@pytest.mark.parametrize(
    "name",
    [
        "two-tiles",
        "small",
        "divided",
        "beside-tails",
        "four-tiles",
        "gemv-int4",
        "parts",
        "skinny-int4",
        "wgmma-int4",
        "stream-int8",
        "dense-stream",
    ],
)
def test_calls_on_several_streams_are_independent(name: str) -> None:
    """Check that launches whose blocks do not all fit the GPU do not wait for each other."""
    assert_streams_apart(choices_of(name)[-1])


@pytest.mark.parametrize("name", ["two-tiles", "gemv-one-row", "narrow-one-row", "parts", "skinny-int4", "wgmma-int4"])
def test_launch_can_be_first_cuda_use_of_thread(name: str) -> None:
    assert_launched_by_a_new_thread(choices_of(name)[0])


@pytest.mark.parametrize("name", [*OF_EACH, "small-of-4", "divided-tails", "wgmma-uint4-zeros"])
def test_repeated_launches_give_equal_bits_with_other_sizes_between(name: str) -> None:
    """Check one cubin with two problems in back-to-back launches."""
    _, k, _ = CASES[name]
    first, shorter = choices_of(name)[-1], choices_of(name, k // 2 // 128 * 128)[-1]
    assert shorter.compile_key == first.compile_key
    runs = [(one.build().run, random_operands(one.problem, GPU, seed=5)) for one in (first, shorter)]
    expected = [call(run, torch.empty_like(x.out), x) for run, x in runs]
    for _ in range(20):
        again = [call(run, torch.full_like(x.out, float("nan")), x) for run, x in runs]
        assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))


@pytest.mark.parametrize("name", ["two-tiles", "small-of-4", "shared", "divided", "beside-tails", "four-tiles"])
def test_last_cluster_finishes_work_that_warps_left(name: str) -> None:
    """Check that warps that poll once, and mostly leave their work, give the same bits as warps that wait."""
    patient = choices_of(name)[-1]
    hasty = dataclasses.replace(patient)
    hasty.__dict__["source"] = dataclasses.replace(patient.source, values={**patient.source.values, "patience": 0})
    assert hasty.path != patient.path
    run, x = hasty.build().run, random_operands(patient.problem, GPU, seed=6)
    expected = call(patient.build().run, torch.empty_like(x.out), x)
    for _ in range(50):
        assert torch.equal(call(run, torch.full_like(x.out, float("nan")), x), expected)


CHAINS: dict[str, tuple[Problem, Any, dict[str, Any]]] = {
    "shared": (mm(128, 128, 4096), cluster("64x64x128_s6_k2_2x2"), {"clusters_per_tile": 3}),
    "divided": (mm(128, 128, 4096), cluster("64x64x64_s6_k2_2x2"), {"clusters_per_tile": 3}),
    "beside": (mm(256, 256, 4096), cluster("128x64x64_s8_k2_1x2"), {"clusters_per_tile": 3}),
    "small": (mm(64, 64, 8192), cluster("64x64x64_s6_k8"), {}),
    "gemv": (mixed(4, 4096, 4096, **INT4, scales="group_128"), gemv_shape(8, 4, 4), {}),
    "gemv-dense": (mm(1, 4096, 4096), gemv_shape(8, 4, 8), {}),
    "narrow": (mm(16, 4096, 4096), narrow_shape(16, 16, 7, 256, 2), {}),
    "parts": (mm(512, 1024, 1024, dtype=F32), parts_shape(128, 128, 5), {"blocks": 24}),
    "parts-divided": (mm(64, 1024, 1024, dtype=F32), parts_shape(128, 64, 6, 4), {"swap_ab": True}),
    "skinny": (mixed(16, 4096, 4096, **INT4, scales="group_128"), skinny_shape(16, 128, 4, 2, 4), {"cluster_k": 2}),
    "stream": (mixed(256, 4096, 4096, **INT4, scales="group_128"), stream_shape(256, 2, 1, 64, 3), {}),
    "wgmma": (mixed(64, 4096, 4096, **INT4, scales="group_128"), wgmma_shape(64, 2, 1, 128, 4, k16_batch=2), {"cluster_k": 2}),
}


@pytest.mark.parametrize("prefetch_stages", [0, 4])
@pytest.mark.parametrize("chain", CHAINS)
def test_overlapping_launches_read_previous_results(chain: str, prefetch_stages: int) -> None:
    """Check alternating operands: a launch overwrites the start of one that the next launch may have prefetched."""
    problem, shape, told = CHAINS[chain]
    x = random_operands(problem, GPU, seed=8)
    # The scale keeps results from growing or vanishing. int4 has a nonzero mean, which multiplies rows by about 1200.
    if x.scale_b is None:
        x = dataclasses.replace(x, b=x.b / problem.k**0.5)
    else:
        x = dataclasses.replace(x, scale_b=x.scale_b / x.scale_b.max() / 1280)
    results = []
    for pdl in (False, True, True, True):
        way = {"pdl": pdl} | ({} if isinstance(shape, PartsShape) else {"prefetch_stages": prefetch_stages if pdl else 0})
        run = choice(problem, shape, detect("cuda"), **told, **way).build().run
        operands = [x.a.clone(), x.a.clone()]
        for i in range(12):
            out = operands[(i + 1) % 2].view(-1)[: x.out.numel()].view(x.out.shape)
            call(run, out, dataclasses.replace(x, a=operands[i % 2]))
            if not pdl:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        results.append(operands)
    assert not torch.equal(results[0][0], x.a)
    assert all(one.isfinite().all() for one in results[0])
    for early in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(early, results[0], strict=True))


def test_whole_tiles_of_persistent_blocks_have_bits_of_one_block_per_tile() -> None:
    problem = mixed(500, 1032, 2048, dtype=BF16, **INT4, scales="group_128")
    x, device = random_operands(problem, GPU, seed=9), detect("cuda")
    persistent = choice(problem, stream_shape(256, 2, 1, 64, 3), device, whole=True)
    alone = choice(problem, wgmma_shape(256, 2, 1, 64, 3), device)
    assert persistent.claims == alone.claims
    outs = [call(one.build().run, torch.empty_like(x.out), x) for one in (persistent, alone)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("layout", ["nt", "tn"])
def test_hard_to_split_numbers_match_torch(layout: str) -> None:
    """Check planes packed by torch as well: they must equal the kernel's own."""
    problem = mm(len(HARD) + 5, len(HARD) + 9, 64, layout, F32)
    a, b = hard_operands(problem, GPU)
    for told in ({}, {"swap_ab": True}):
        out = torch.empty(problem.out.size, device=GPU)
        choice(problem, parts_shape(128, 64, 7), detect("cuda"), **told).build().run(out, (a, b), ())
        assert_as_in_torch(out, a, b)
    packed = choice(dataclasses.replace(problem, prepacked=True), parts_shape(128, 64, 7), detect("cuda"))
    packed.build().run(again := torch.empty_like(out), (a, packed.pack(b)), ())
    assert torch.equal(again.nan_to_num(7.0), out.nan_to_num(7.0))


@pytest.mark.parametrize("name", ["two-tiles", "gemv-int8", "skinny-int8-bfloat16", "wgmma-int8"])
def test_rejects_unaligned_address(name: str) -> None:
    first = choices_of(name)[0]
    x = random_operands(first.problem, GPU, seed=7)
    moved = torch.empty(x.a.numel() + 1, dtype=x.a.dtype, device=GPU)[1:].view(x.a.shape)
    with pytest.raises(ErrorFromChoice, match="an operand is not aligned as planned"):
        call(first.build().run, x.out, dataclasses.replace(x, a=moved))
