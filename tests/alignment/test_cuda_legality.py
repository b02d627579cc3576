"""Legality of the cuda families and their configs: every rule with its reason."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from cuda_cases import (
    BF16,
    F16,
    F32,
    F64,
    FAMILY,
    INT4,
    SM90,
    UINT4,
    UINT8,
    addmm,
    blocked,
    bmm,
    cluster_shape,
    config,
    dense_shape,
    family_of,
    gated,
    gemv_shape,
    grouped_shape,
    mixed,
    mixed_groups,
    mm,
    parts_shape,
    skinny_shape,
    stream_shape,
    wgmma_shape,
)

from gemmtune.backends.cuda.boxes import by_k
from gemmtune.backends.cuda.bsr import configs as bsr
from gemmtune.backends.cuda.bsr.packing import SPARE
from gemmtune.backends.cuda.bsr_skinny import family as bsr_skinny
from gemmtune.backends.cuda.bsr_skinny.packing import HEAD_WORDS, LINE_WORDS
from gemmtune.backends.cuda.cluster import configs as cluster
from gemmtune.backends.cuda.cluster.configs import clusters_of, tiles_of
from gemmtune.backends.cuda.gemv import family as gemv
from gemmtune.backends.cuda.hopper import registers_per_thread
from gemmtune.backends.cuda.mixed import family as mixed_family
from gemmtune.backends.cuda.mixed.weights import Factor, Weights, weights_of
from gemmtune.backends.cuda.parts import configs as parts
from gemmtune.backends.cuda.stream.configs import Division as DenseDivision
from gemmtune.backends.cuda.stream.configs import tiles_of as dense_tiles_of
from gemmtune.backends.cuda.stream.family import Work as DenseWork
from gemmtune.backends.cuda.wgmma import configs as wgmma
from gemmtune.backends.cuda.wgmma_stream.family import Division
from gemmtune.device import preset
from gemmtune.problem import Layout, Precision, Problem
from gemmtune.problem.trace import trace

ROWS = "TMA copies contiguous rows that are aligned to 16 bytes"
LINES = "TMA copies rows or columns that are aligned to 16 bytes"
CLEARED = "an operand is contiguous along K, where TMA starts at multiples of 16 bytes, but a group starts at any term"
ANY_ROW = "a is contiguous along M, where TMA starts at multiples of 16 bytes, but a group starts at any row"
FITTED = "fitted tiles need swap_ab and block_n as a multiple of 32"
TURNS = "block_m is 256, expected 128, or a multiple of it with fitted tiles"
LEFT = "swap_ab needs groups of rows, and in a cluster fitted tiles side by side (cluster_n)"
SMALL_CLUSTER, SQUARE = cluster.SHAPES[0], cluster_shape("64x64x64_s6_k2_2x2")
SIXTEEN = bsr_skinny.Shape(block_n=16, warps=4, stages=2, stage_fragments=4)
SKINNY, WGMMA, LARGE = skinny_shape(16, 128, 4, 2, 4), wgmma_shape(128, 2, 1, 128, 4), wgmma_shape(256, 2, 1, 64, 5)


def strided(problem: Problem, stride: tuple[int, int], offset: int = 0) -> Problem:
    """Return the problem with other strides or offset of x."""
    return dataclasses.replace(problem, a=dataclasses.replace(problem.a, stride=stride, offset=offset))


OF_ALL: list[tuple[Any, str, str]] = [
    (lambda p: p, "sm80", "works on CUDA devices of compute capability 9.0, not on sm80"),
    (lambda p: p, "sm100", "works on CUDA devices of compute capability 9.0, not on sm100"),
    (lambda p: dataclasses.replace(p, epilogue=trace(lambda acc, x: acc * x, F32, [torch.empty(1, dtype=F64)])), "sm90",
     "operand 0 of the epilogue is float64, expected one of bfloat16, float16, float32"),
    (lambda p: dataclasses.replace(p, epilogue=trace(lambda acc, *x: acc + sum(x), F32, [torch.empty(1)] * 9)), "sm90",
     "the epilogue has 9 operands, a launch passes at most 8"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "arch", "reason"), OF_ALL, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize(
    ("family", "problem"),
    [
        ("bsr", blocked()),
        ("bsr_skinny", blocked(16)),
        ("cluster", mm()),
        ("gemv", mm(1)),
        ("narrow", mm(16)),
        ("parts", mm(dtype=F32)),
        ("skinny", mixed()),
        ("stream", mm(256)),
        ("wgmma", mixed(64)),
        ("wgmma_stream", mixed(256)),
    ],
    ids=str,
)
def test_every_family_refuses(family: str, problem: Problem, change: Any, arch: str, reason: str) -> None:
    assert FAMILY[family].why_not(change(problem), preset(arch)) == reason


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (mm(), "b is not block-sparse"),
        (blocked(dtype=F32), "a is float32, expected bfloat16 or float16"),
        (blocked(m=0), "the product is empty: nothing is launched"),
        (blocked(prepacked=False), "b is not prepacked, and packing is done once: pass the result of gemmtune.prepack"),
        (blocked(block=64), "blocks of 64x64, expected 16x16 or 32x32"),
        (blocked(block=(16, 32)), "blocks of 16x32, expected 16x16 or 32x32"),
        (blocked(m=500, layout="tt"), f"x has strides (1, 500) and offset 0: {LINES}"),
        (blocked(n=2**20, k=2**19), "more blocks than indices of 32 bits can count"),
        (blocked(m=2**30), "a tile past the last row or column would not fit 32 bits"),
    ],
)
def test_bsr_refuses(problem: Problem, reason: str) -> None:
    assert FAMILY["bsr"].why_not(problem, SM90) == reason


AT_ONCE = "expected aligned rows of {} elements along K, or an even number of contiguous tokens"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (mm(16), "b is not block-sparse"),
        (blocked(16, prepacked=False), "b is not prepacked, and packing is done once: pass the result of gemmtune.prepack"),
        (blocked(33), "x has 33 tokens, at most 32 are served: sums of more would take the registers of weight blocks in flight"),
        (blocked(15, layout="tt"), f"x has strides (1, 15) and offset 0: {AT_ONCE.format(4)}"),
        (strided(blocked(3, block=32), (1028, 1)), f"x has strides (1028, 1) and offset 0: {AT_ONCE.format(8)}"),
        (strided(blocked(3), (1028, 1), 2), f"x has strides (1028, 1) and offset 2: {AT_ONCE.format(4)}"),
        (strided(blocked(4, layout="tt"), (1, 2**20)), "x spans 2147483648 bytes, offsets in it would not fit 32 bits"),
        (strided(blocked(4, layout="tt"), (1, 2**20 - 2)), None),
        (blocked(1, 16, 2**29), "K is 536870912: the columns of a panel would not fit 32 bits"),
    ],
)
def test_bsr_skinny_refuses(problem: Problem, reason: str | None) -> None:
    assert FAMILY["bsr_skinny"].why_not(problem, SM90) == reason


@pytest.mark.parametrize("m", range(1, 33))
def test_bsr_skinny_serves_every_token_count_with_contiguous_rows(m: int) -> None:
    problem = strided(blocked(m), (1028, 1), 4)
    assert FAMILY["bsr_skinny"].why_not(problem, SM90) is None
    best = FAMILY["bsr_skinny"].candidates(problem, SM90)[0]
    assert FAMILY["bsr_skinny"].why_not_config(problem, SM90, best) is None
    assert best.shape.block_n == min(n for n in bsr_skinny.TOKENS if n >= m)


def test_read_ahead_stays_inside_packed_weight() -> None:
    assert max(shape.queue for shape in bsr.SHAPES) <= SPARE
    assert all(words % shape.stage_fragments == 0 for shape in bsr_skinny.SHAPES for words in (HEAD_WORDS, LINE_WORDS)), (
        "the columns of a panel's last stage do not end in the next panel"
    )


def test_register_handover_fits_register_file() -> None:
    for shape in (shape for shape in bsr.SHAPES if shape.gives_registers):
        assert shape.warps % 4 == 0, "whole warp groups give and take"
        all_of_them = registers_per_thread(shape.threads, 1) * shape.threads
        assert 128 * bsr.GIVEN_REGISTERS + 32 * shape.warps * shape.left_registers <= all_of_them
        assert shape.left_registers >= shape.block_n + 40


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (mm(dtype=F32), "a is float32, expected bfloat16 or float16"),
        (mm(k=0), "the product is empty: nothing is launched"),
        (mm(k=8196), f"a has strides (8196, 1) and offset 0: {LINES}"),
        (mm(n=100, layout="nn"), f"the transpose of b has strides (1, 100) and offset 0: {LINES}"),
        (dataclasses.replace(mm(), a=dataclasses.replace(mm().a, offset=4)), f"a has strides (8192, 1) and offset 4: {LINES}"),
        (
            Problem.int_mm(128, 128, 8192, device_type="cuda"),
            "int_mm is not an operation of this backend, which has mm, addmm, bmm, baddbmm",
        ),
    ],
)
def test_cluster_refuses(problem: Problem, reason: str) -> None:
    assert FAMILY["cluster"].why_not(problem, SM90) == reason


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (mm(), "bfloat16: only float32 in full precision (ieee) is split into parts"),
        (mm(k=63, dtype=F32), "K = 63: sums of fewer than 64 terms are more exact without parts"),
        (mm(m=0, dtype=F32), "the product is empty: nothing is launched"),
        (dataclasses.replace(mm(dtype=F32), precision=Precision(input_mode="tf32")),
         "tf32: only float32 in full precision (ieee) is split into parts"),
        (mixed(), "mixed_mm is not an operation of this backend, which has mm, addmm, bmm, baddbmm"),
    ],
)  # fmt: skip
def test_parts_refuses(problem: Problem, reason: str) -> None:
    assert FAMILY["parts"].why_not(problem, SM90) == reason


def rows(m: int = 512, n: int = 512, k: int = 512, groups: int = 4, **fields: Any) -> Problem:
    return Problem.grouped_mm(m, n, k, groups=groups, device_type="cuda", **fields)


def terms(m: int = 512, n: int = 512, k: int = 512, **fields: Any) -> Problem:
    return Problem.grouped_k_mm(m, n, k, groups=4, device_type="cuda", **fields)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (rows(dtype=F32), "a is float32, expected bfloat16 or float16"),
        (rows(k=0), "the product is empty: nothing is launched"),
        (rows(k=516), f"a has strides (516, 1) and offset 0: {LINES}"),
        (rows(n=100, layout="nn"), f"the transpose of b has strides (51200, 1, 100) and offset 0: {LINES}"),
        (rows(m=2**30), "a tile past the last row or column would not fit 32 bits"),
        (terms(layout="nt"), CLEARED),
        (rows(layout="tn"), ANY_ROW),
        (terms(m=508), f"a has strides (1, 508) and offset 0: {LINES}"),
        (mm(), "mm is not an operation of this backend, which has grouped_mm, grouped_k_mm"),
    ],
)
def test_grouped_refuses(problem: Problem, reason: str) -> None:
    assert FAMILY["grouped"].why_not(problem, SM90) == reason


@pytest.mark.parametrize(
    ("problem", "shape", "launched", "reason"),
    [
        (rows(), grouped_shape(256, 6), {}, "takes 311488 bytes of shared memory, a block has 232448"),
        (rows(), grouped_shape(16, 11), {}, "a tile of 128x16: results are stored in lines of 64"),
        (rows(), grouped_shape(256, 4, cluster_m=2), {"swap_ab": True}, LEFT),
        (terms(), grouped_shape(64, 4), {"swap_ab": True}, LEFT),
        (rows(), grouped_shape(128, 4, cluster_m=2, fitted=32), {"swap_ab": True}, LEFT),
        (rows(), grouped_shape(128, 4, fitted=32), {}, FITTED),
        (rows(), grouped_shape(80, 4, fitted=32), {"swap_ab": True}, FITTED),
        (rows(), grouped_shape(64, 4, block_m=256), {"swap_ab": True}, TURNS),
        (rows(), grouped_shape(64, 4, block_m=192, fitted=32), {"swap_ab": True}, TURNS.replace("256", "192")),
        (rows(layout="tn"), grouped_shape(32, 10), {"swap_ab": True},
         "an operand whose lines run across K is copied in lines of 64, and a tile has 32 columns"),
        (rows(), grouped_shape(64, 4, cluster_n=2), {"blocks": 1},
         "1 blocks in strips of 8, expected at least a cluster of 2 and one"),
        (rows(2**29, 2**15, 8, groups=1024), grouped_shape(64, 4), {}, "2199023255552 tiles, at most 1073741824 can be counted"),
    ],
)  # fmt: skip
def test_grouped_refuses_config(problem: Problem, shape: Any, launched: dict[str, Any], reason: str) -> None:
    assert FAMILY["grouped"].why_not_config(problem, SM90, config(shape, **launched)) == reason


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_parts_serves_all_strides(layout: str) -> None:
    for problem in (mm(33, 20, 64, layout, F32), mm(1001, 999, 1003, layout, F32), bmm(3, 100, 60, 70, layout, F32)):
        assert FAMILY["parts"].why_not(problem, SM90) is None
        ways = [{"swap_ab": swap_ab} for swap_ab in (False, True)]
        assert {FAMILY["parts"].why_not_config(problem, SM90, config(parts.SHAPES[0], **way)) for way in ways} == {None}


@pytest.mark.parametrize(
    ("problem", "shape", "launched", "reason"),
    [
        (mm(dtype=F32), parts_shape(128, 128, 6), {}, "takes 245872 bytes of shared memory, a block has 232448"),
        (mm(dtype=F32), parts_shape(64, 128, 2, 16), {}, "a cluster has 16 blocks, at most 8 can be relied on"),
        (mm(k=64, dtype=F32), parts_shape(64, 64, 9, 8), {}, "K has 2 steps, too few for 8 parts of two"),
        (mm(dtype=F32), parts_shape(64, 64, 9, 2), {"blocks": 132},
         "cluster_k is 2 and blocks 132: a persistent block needs cluster_k=1"),
        (mm(2**20, 2**20, 128, dtype=F32), parts_shape(64, 16, 16, 2), {},
         f"{2**30} tiles, at most {2**27} fit a grid"),
        (dataclasses.replace(mm(k=999, dtype=F32), prepacked=True), parts_shape(64, 64, 9), {},
         "b is packed, but a needs a copy first: TMA copies rows or columns that are aligned to 16 bytes"),
    ],
)  # fmt: skip
def test_parts_refuses_config(problem: Problem, shape: Any, launched: dict[str, Any], reason: str) -> None:
    assert FAMILY["parts"].why_not(problem, SM90) is None
    assert FAMILY["parts"].why_not_config(problem, SM90, config(shape, **launched)) == reason


VECTOR = "it is loaded in contiguous rows that are aligned to 16 bytes"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (mm(5), "a has 5 rows, at most 4 are served"),
        (bmm(2, 1, 128, 128), "bmm is not an operation of this backend, which has mm, addmm, mixed_mm"),
        (mm(1, dtype=F32), "a is float32, expected bfloat16 or float16"),
        (mm(1, k=0), "the product is empty: nothing is launched"),
        (mm(1, k=8196), "K is 8196, expected a multiple of 8"),
        (mixed(1, k=2056), "K is 2056, expected a multiple of 16"),
        (mixed(1, k=2064, **INT4), "K is 2064, expected a multiple of 32"),
        (mixed(1, dtype_b=torch.float8_e4m3fn), "b is float8_e4m3fn, expected integers"),
        (mm(1, 1, 2**29), f"a column of b has {2**30} bytes, with up to 0 elements between scales: expected less than {2**30}"),
        (mm(2, layout="tn"), f"a has strides (1, 2) and offset 0: {VECTOR}"),
        (
            mm(1, layout="nn"),
            "the transpose of b has strides (1, 128) and offset 0: "
            "it is loaded in contiguous rows (columns of b) that are aligned to 16 bytes",
        ),
        (dataclasses.replace(mm(1), a=dataclasses.replace(mm(1).a, offset=4)), f"a has strides (8192, 1) and offset 4: {VECTOR}"),
    ],
    ids=str,
)
def test_gemv_refuses(problem: Problem, reason: str) -> None:
    assert FAMILY["gemv"].why_not(problem, SM90) == reason


@pytest.mark.parametrize("problem", [
    mm(1), mm(4, 100, 72, dtype=F16), mm(1, layout="tt"), addmm(3, 100, 136), mixed(1, 1, 16), mixed(3, 1001, 2080, **INT4),
    mixed(4, 1001, 2048, scales="group_32", zeros=True), mixed(2, scales="group_64", scale_dtype=F32, **UINT4),
], ids=str)  # fmt: skip
def test_gemv_serves(problem: Problem) -> None:
    assert FAMILY["gemv"].why_not(problem, SM90) is None
    narrow = [shape for shape in gemv.SHAPES if shape.block_n < 32]
    assert {FAMILY["gemv"].why_not_config(problem, SM90, config(shape)) for shape in narrow} == {None}


@pytest.mark.parametrize(("family", "m"), [("gemv", 2), ("skinny", 16), ("wgmma", 64), ("wgmma_stream", 256)])
def test_packs_prepacked_weight_unless_columns_are_contiguous(family: str, m: int) -> None:
    by_rows = dataclasses.replace(mixed(m, layout="nn"), prepacked=True)
    assert FAMILY[family].why_not(by_rows, SM90) is None
    weight, config = torch.zeros(2048, 1024, dtype=torch.int8), FAMILY[family].candidates(by_rows, SM90)[0]
    assert FAMILY[family].packed_format(by_rows, config) is not None
    assert Layout.of(FAMILY[family].pack(weight)).stride == (1, 2048)
    assert FAMILY[family].packed_format(dataclasses.replace(mixed(m), prepacked=True), config) is None


def test_scale_groups_limit_load_size() -> None:
    groups = [mixed(1, scales=f"group_{n}", **bits) for bits in (INT4, {}) for n in (32, 64, 128)]
    assert [gemv.words_of(gemv.stored(problem)) for problem in groups] == [1, 2, 4, 2, 4, 4]
    assert [gemv.words_of(gemv.stored(problem)) for problem in (mm(1), mixed(1, scales="column"), mixed(1))] == [4, 4, 4]


@pytest.mark.parametrize("family", ["skinny", "wgmma", "wgmma_stream"])
@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (mm(16, 128, 128), "mm is not an operation of this kernel, which has {}"),
        (mixed(0), "the product is empty: nothing is launched"),
        (mixed(k=0), "the product is empty: nothing is launched"),
        (mixed(dtype=F32), "a is float32, expected bfloat16 or float16"),
        (mixed(dtype_b=torch.float8_e4m3fn), "b is float8_e4m3fn, expected integers"),
        (mixed(k=2056), "K is 2056, expected a multiple of 16"),
        (mixed(k=2064, **INT4), "K is 2064, expected a multiple of 32"),
        (mixed(layout="tn"), f"a has strides (1, 16) and offset 0: {ROWS}"),
        (
            mixed(layout="nn"),
            "the transpose of b has strides (1, 1024) and offset 0: "
            "TMA copies contiguous rows (columns of b) that are aligned to 16 bytes",
        ),
        (mixed(n=1028, scales="group_128"), f"scale_b has strides (1028, 1) and offset 0: {ROWS}"),
        (dataclasses.replace(mixed(), a=dataclasses.replace(mixed().a, offset=4)), f"a has strides (2048, 1) and offset 4: {ROWS}"),
        (
            dataclasses.replace(
                mixed(scales="column"), epilogue=trace(lambda acc, *x: acc + sum(x), F32, [torch.empty(1024, dtype=BF16)] * 8)
            ),
            "the epilogue has 8 operands, a launch passes at most 7",
        ),
    ],
)
def test_mixed_families_refuse(family: str, problem: Problem, reason: str) -> None:
    operations = "mixed_mm and mixed_grouped_mm" if family == "wgmma" else "mixed_mm"
    assert FAMILY[family].why_not(problem, SM90) == reason.format(operations)


OVERLAPPING = dataclasses.replace(mixed_groups().b, stride=(0, 1, 2048))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Problem.grouped_mm(2048, 512, 512, device_type="cuda"), "grouped_mm is not an operation of this kernel, which has {}"),
        (
            Problem.scaled_grouped_mm(512, 512, 512, device_type="cuda"),
            "scaled_grouped_mm is not an operation of this kernel, which has {}",
        ),
        (mixed_groups(0), "the product is empty: nothing is launched"),
        (mixed_groups(dtype=F32), "a is float32, expected bfloat16 or float16"),
        (mixed_groups(k=2064, **INT4), "K is 2064, expected a multiple of 32"),
        (mixed_groups(layout="tn"), f"a has strides (1, 2048) and offset 0: {ROWS}"),
        (
            mixed_groups(layout="nn"),
            "the transpose of b has strides (2097152, 1, 1024) and offset 0: "
            "TMA copies contiguous rows (columns of b) that are aligned to 16 bytes",
        ),
        (
            dataclasses.replace(mixed_groups(), b=OVERLAPPING),
            "the transpose of b has strides (0, 2048, 1) and offset 0: "
            "TMA copies contiguous rows (columns of b) that are aligned to 16 bytes",
        ),
        (mixed_groups(n=1028, scales="group_128"), f"scale_b has strides (16448, 1028, 1) and offset 0: {ROWS}"),
        (mixed_groups(2**30, 128, 128), "a tile past the last row or column would not fit 32 bits"),
        (
            dataclasses.replace(
                mixed_groups(), epilogue=trace(lambda acc, *x: acc + sum(x), F32, [torch.empty(1024, dtype=BF16)] * 7)
            ),
            "the epilogue has 7 operands, a launch passes at most 6",
        ),
    ],
    ids=str,
)
def test_mixed_groups_are_refused(problem: Problem, reason: str) -> None:
    assert FAMILY["wgmma"].why_not(problem, SM90) == reason.format("mixed_mm and mixed_grouped_mm")


@pytest.mark.parametrize("fields", [{}, INT4, UINT4], ids=str)
@pytest.mark.parametrize("scales", ["column", "group_32", "group_64", "group_128"])
def test_mixed_groups_are_served(fields: dict[str, Any], scales: str) -> None:
    for dtype in (F16, BF16):
        problem = mixed_groups(n=1000, dtype=dtype, scales=scales, **fields)
        assert FAMILY["wgmma"].why_not(problem, SM90) is None
        shapes = wgmma.SHAPES_FOR_GROUPS[weights_of(problem).bits]
        assert sum(FAMILY["wgmma"].why_not_config(problem, SM90, config(shape)) is None for shape in shapes) >= 3
    interleaved = Layout(size=(8, 2048, 1000), stride=(2048, 1, 8 * 2048), dtype=torch.int8)
    assert FAMILY["wgmma"].why_not(dataclasses.replace(mixed_groups(n=1000), b=interleaved), SM90) is None


def test_refuses_result_dtype() -> None:
    doubled = trace(lambda acc, x: acc * x, F32, [torch.empty(128, 128, dtype=F64)])
    problem = dataclasses.replace(mm(), epilogue=doubled, out=Layout.contiguous((128, 128), F64))
    assert FAMILY["cluster"].why_not(problem, SM90) == "the result is float64, expected one of bfloat16, float16, float32"


def test_skinny_refuses_many_rows() -> None:
    assert FAMILY["skinny"].why_not(mixed(33), SM90) == "a has 33 rows, at most 32 are served"
    assert FAMILY["skinny"].why_not(mixed(32), SM90) is None


@pytest.mark.parametrize("problem", [mm(m=1), mm(m=13, n=100, k=8200), mm(layout="tn"), mm(layout="tt"), mm(layout="nn")], ids=str)
def test_cluster_serves(problem: Problem) -> None:
    assert FAMILY["cluster"].why_not(problem, SM90) is None


@pytest.mark.parametrize("fields", [{}, INT4, UINT4, {"dtype_b": UINT8}], ids=str)
@pytest.mark.parametrize("scales", ["none", "tensor", "column", "group_32", "group_64", "group_128"])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_mixed_families_serve(fields: dict[str, Any], scales: str, dtype: torch.dtype) -> None:
    for zeros in (False, True)[: 1 if scales == "none" else 2]:
        few, more = (mixed(m, 1000, 2048, dtype=dtype, scales=scales, zeros=zeros, **fields) for m in (13, 77))
        assert FAMILY["skinny"].why_not(few, SM90) is None
        assert [bool(x.group) for x in weights_of(few).factors.values()] == [scales.startswith("group")] * len(few.scales)
        assert FAMILY["wgmma"].why_not(more, SM90) is None
        shapes = wgmma.SHAPES[weights_of(more).bits]
        assert sum(FAMILY["wgmma"].why_not_config(more, SM90, config(shape)) is None for shape in shapes) >= 3


@pytest.mark.parametrize(
    ("problem", "weights"),
    [
        (mixed(), Weights(bits=8, signed=True)),
        (mixed(dtype_b=UINT8), Weights(bits=8, signed=False)),
        (mixed(scales="column"), Weights(bits=8, signed=True, scale=Factor(dtype=F16, group=0))),
        (mixed(scales="group_64", **INT4), Weights(bits=4, signed=True, scale=Factor(dtype=F16, group=64))),
        (mixed(k=64, scales="group_64", **INT4), Weights(bits=4, signed=True, scale=Factor(dtype=F16, group=0))),
        (
            mixed(scales="group_32", zeros=True, scale_dtype=F32, **UINT4),
            Weights(bits=4, signed=False, scale=Factor(dtype=F32, group=32), zero=Factor(dtype=F32, group=32)),
        ),
    ],
)
def test_weights_of_problem(problem: Problem, weights: Weights) -> None:
    assert weights_of(problem) == weights


@pytest.mark.parametrize(
    ("stride", "expected"),
    [((64, 1), True), ((72, 1), True), ((1, 128), False), ((60, 1), None), ((32, 1), None), ((0, 1), None), ((2, 128), None)],
)
def test_contiguous_dimension_of_operand(stride: tuple[int, int], expected: bool | None) -> None:
    assert by_k(Layout(size=(128, 64), stride=stride, dtype=BF16)) is expected


@pytest.mark.parametrize(
    ("dtype", "pitch", "offset", "batch", "expected"),
    [(BF16, 68, 0, 8192, None), (F32, 68, 0, 8192, True), (F32, 66, 0, 8192, None), (BF16, 72, 4, 9216, None),
     (F32, 72, 4, 9216, True), (F32, 72, 2, 9216, None), (F32, 72, 0, 9220, True), (BF16, 72, 0, 9220, None)],
)  # fmt: skip
def test_16_byte_alignment_depends_on_dtype(dtype: torch.dtype, pitch: int, offset: int, batch: int, expected: bool | None) -> None:
    assert by_k(Layout(size=(2, 128, 64), stride=(batch, pitch, 1), dtype=dtype, offset=offset)) is expected


def test_tiles_follow_orientation_and_whole_clusters() -> None:
    square, narrow = config(SQUARE), cluster_shape("64x16x128_s5_k2")
    assert [clusters_of(mm(m, n), square) for m, n in ((65, 65), (128, 129), (129, 257))] == [1, 2, 6]
    assert [tiles_of(mm(m, n), square) for m, n in ((65, 65), (128, 129), (129, 257))] == [4, 8, 24]
    assert tiles_of(mm(16, 1000), config(narrow)) == 63
    assert tiles_of(mm(16, 1000), config(narrow, swap_ab=True)) == 16
    assert tiles_of(bmm(3, 16, 1000, 64), config(narrow, swap_ab=True)) == 48


def test_tiles_and_steps_cover_remainders() -> None:
    few, more = config(SKINNY), config(WGMMA)
    assert (mixed_family.tiles_of(mixed(n=1032), few), mixed_family.steps_of(mixed(k=2064), few)) == ((1, 9), 17)
    assert (mixed_family.tiles_of(mixed(129, 1032), more), mixed_family.steps_of(mixed(k=2064), more)) == ((2, 9), 17)
    assert [mixed_family.steps_of(mixed(k=2080, **INT4), one) for one in (few, more)] == [9, 9]


OF_CONFIGS: list[tuple[Problem, Any, dict[str, Any], str]] = [
    (mm(), SMALL_CLUSTER, {"clusters_per_tile": 257}, "257 clusters share a tile, at most 256 can"),
    (mm(), cluster_shape("128x64x64_s8_k1_2x2"), {"clusters_per_tile": 513}, "513 clusters share a tile, at most 512 can"),
    (mm(k=512), cluster_shape("64x64x64_s6_k8"), {"clusters_per_tile": 2}, "K has 8 steps, too few for 16 parts"),
    (mm(layout="nn"), cluster_shape("64x96x64_s10_k4_2x1"), {},
     "an operand whose lines run across K is copied in lines of 64, and a tile has 96 columns"),
    (mm(2**22, 64, 512), SMALL_CLUSTER, {}, "65536 tiles, at most 32768 fit a grid"),
    (mm(2**20, 64, 512), SMALL_CLUSTER, {"clusters_per_tile": 2}, "536870912 bytes of sums in memory, at most 268435456"),
    (mm(2**20 - 64, 64, 512), cluster_shape("128x64x64_s8_k2_1x2"), {}, "a cluster has 1x2 tiles, the result 8192x1"),
    (mm(64, 512), SQUARE, {}, "a cluster has 2x2 tiles, the result 1x8"),
    (mm(512, 512), dataclasses.replace(SQUARE, cluster_k=4), {}, "a cluster has 16 blocks, at most 8 can be relied on"),
    (mm(512, 512), cluster.Shape(block_m=64, block_n=16, block_k=128, stages=4, cluster_m=4), {},
     "4 blocks copy 16 lines for each other, in parts that have to be multiples of 8"),
    (mm(512, 512, layout="tn"), cluster.Shape(block_m=64, block_n=64, block_k=16, stages=4, cluster_n=4), {},
     "4 blocks copy 16 lines for each other, in parts that have to be multiples of 8"),
    (gated(blocked()), bsr.SHAPES[4], {}, "the epilogue needs 56 registers, but 64 of 112 hold sums"),
    (blocked(), bsr.SHAPES[1], {"blocks": 1}, "1 blocks, expected at least a cluster of 2"),
    (blocked(layout="tt"), bsr.SHAPES[10], {},
     "an operand whose lines run across K is copied in lines of 64, and a tile has 32 columns"),
    (blocked(17), SIXTEEN, {}, "x has 17 tokens, the kernel takes at most 16"),
    (blocked(8, layout="tt"), dataclasses.replace(SIXTEEN, block_n=8), {},
     "tokens are contiguous in x, which takes a kernel of at least 16 tokens, this one has 8"),
    (blocked(m=2**29, n=2**20, k=64), bsr.SHAPES[8], {}, "34359738368 tiles, at most 1073741824 can be counted"),
    (mixed(17), SKINNY, {}, "a has 17 rows, the kernel takes at most 16"),
    (mixed(), SKINNY, {"cluster_k": 16}, "16 blocks in a cluster, at most 8 are allowed"),
    (mixed(k=256), SKINNY, {"cluster_k": 3}, "K has 2 steps, too few for 3 blocks"),
    (mixed(n=2**22 + 2**17), skinny_shape(16, 64, 4, 2, 4), {}, "1 by 67584 tiles, at most 65535 fit a dimension of a grid"),
    (mixed(scales="group_128"), skinny_shape(16, 256, 2, 1, 1), {}, "needs about 320 registers for each thread, 255 are left"),
    (mm(1), gemv_shape(16, 16, 4), {}, "needs about 314 registers for each thread, 255 are left"),
    (mixed(128), dataclasses.replace(WGMMA, blocks_per_sm=2), {},
     "takes 197632 bytes of shared memory, too many for 2 blocks on a multiprocessor"),
    (mixed(128), WGMMA, {"cluster_k": 16}, "16 blocks in a cluster, at most 8 are allowed"),
    (mixed(128), dataclasses.replace(WGMMA, block_m=64, col_tiles=4, line_bytes=64), {},
     "a tile has 512 columns, at most 256 are copied at once"),
    (mixed(128, k=256), WGMMA, {"cluster_k": 3}, "K has 2 steps, too few for 3 blocks"),
    (mixed_groups(), WGMMA, {"prefetch_stages": 4},
     "prefetch_stages is 4, expected 0: the previous launch may write the group offsets"),
    (mixed_groups(2**24, 2**13, 64, 1024), WGMMA, {}, "8589934592 tiles, at most 1073741824 can be counted"),
    (mixed(2**24, n=128), WGMMA, {}, "131072 by 1 tiles, at most 65535 fit a dimension of a grid"),
    (mixed(128), dataclasses.replace(WGMMA, k16_batch=8), {},
     "a stage has 128 elements of K, expected an even number of batches of 128"),
    (mixed(128, **INT4), dataclasses.replace(WGMMA, stages=2, k16_batch=1), {},
     "a batch has 16 of K, less than the 16 bytes that are read at once"),
    (mixed(128), dataclasses.replace(LARGE, warp_groups=1), {},
     "1 warp groups of 1 blocks would get registers, expected 2 of 1"),
    (mixed(128, scales="column"), dataclasses.replace(LARGE, block_m=192, col_tiles=2, stages=3), {},
     "needs about 258 registers for each thread, 240 are left"),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "shape", "launched", "reason"), OF_CONFIGS, ids=lambda x: x if isinstance(x, str) else "")
def test_refuses_config(problem: Problem, shape: Any, launched: dict[str, Any], reason: str) -> None:
    assert family_of(shape).why_not_config(problem, SM90, config(shape, **launched)) == reason


@pytest.mark.parametrize(
    ("problem", "shape", "launched", "room", "needed"),
    [
        (mm(), SMALL_CLUSTER, {}, 64, 110704),
        (mixed(), SKINNY, {"cluster_k": 2}, 80, 90320),
        (mixed(128), WGMMA, {"cluster_k": 2}, 160, 230400),
    ],
)
def test_refuses_shared_memory_above_limit(problem: Problem, shape: Any, launched: Any, room: int, needed: int) -> None:
    small = dataclasses.replace(SM90, smem_per_block_bytes=room * 1024)
    reason = f"takes {needed} bytes of shared memory, a block has {room * 1024}"
    assert family_of(shape).why_not_config(problem, small, config(shape, **launched)) == reason


def test_two_blocks_of_half_the_memory_fit() -> None:
    alone = [str(one) for one in cluster.SHAPES if 2 * (one.shared_bytes + 1024) > SM90.smem_per_sm_bytes]
    assert alone == [str(one) for one in cluster.SHAPES if one.blocks_per_sm == 1]
    assert len(alone) == 5
    assert [one.prefetch_stages for one in cluster.SHAPES if one.blocks_per_sm == 1] == [6, 3, 5, 4, 4]
    assert all(one.prefetch_stages == one.stages for one in cluster.SHAPES if one.blocks_per_sm == 2)
    four, few = cluster_shape("128x64x64_s8_k1_2x2"), dataclasses.replace(cluster_shape("128x64x64_s8_k1_2x2"), stages=4)
    assert [(one.blocks_per_sm, one.in_flight) for one in (four, few)] == [(1, 16), (2, 8)]


def test_received_sums_have_room_or_reuse_stages() -> None:
    weights = weights_of(mixed())
    assert WGMMA.shared_bytes(weights, 2) == WGMMA.shared_bytes(weights) + 64 * 128 * 4
    assert LARGE.shared_bytes(weights, 2) == LARGE.shared_bytes(weights)
    assert SKINNY.shared_bytes(weights, 2) == SKINNY.shared_bytes(weights) + 16 * 128 * 4 + 128


def test_parts_of_long_k_are_contiguous_or_interleaved() -> None:
    assert not config(cluster_shape("64x64x64_s12_k2"), clusters_per_tile=4).interleaved_k
    assert config(cluster_shape("64x64x64_s12_k2"), clusters_per_tile=5).interleaved_k


@pytest.mark.parametrize(("threads", "blocks", "registers"), [(128, 1, 255), (288, 1, 168), (160, 2, 168), (1024, 1, 64)])
def test_registers_per_thread(threads: int, blocks: int, registers: int) -> None:
    assert registers_per_thread(threads, blocks) == registers


@pytest.mark.parametrize(
    ("shape", "told", "reason"),
    [
        (stream_shape(256, 2, 1, 64, 4), {}, "takes 305664 bytes of shared memory, a block has 232448"),
        (stream_shape(80, 2, 1, 64, 3), {}, "expected rows in multiples of 32, 2 or 3 warp groups, and one block at a time"),
        (stream_shape(64, 1, 1, 64, 3), {}, "expected rows in multiples of 32, 2 or 3 warp groups, and one block at a time"),
        (stream_shape(128, 3, 1, 64, 4), {"cluster_k": 2}, "expected rows in multiples of 32, 2 or 3 warp groups, and one block"),
        (stream_shape(128, 3, 1, 64, 4), {"blocks": 0}, "0 blocks, expected 1 to 256"),
        (stream_shape(256, 3, 1, 64, 2), {}, "needs about 192 registers for each thread, 160 are left"),
        (stream_shape(256, 2, 1, 64, 3), {"blocks": 257}, "257 blocks, expected 1 to 256"),
        (stream_shape(256, 2, 1, 64, 3), {"runs": 2}, "2 runs, expected 1, or whole tiles with as many steps along K"),
        (stream_shape(256, 2, 1, 64, 3), {"runs": 99, "whole": True}, "99 runs, expected 1, or whole tiles"),
    ],
)
def test_persistent_blocks_refuse(shape: Any, told: dict[str, Any], reason: str) -> None:
    found = FAMILY["wgmma_stream"].why_not_config(mixed(256, **INT4, scales="group_128"), SM90, config(shape, **told))
    assert found is not None
    assert reason in found, found


def test_persistent_blocks_count_tiles_in_32_bits() -> None:
    many = mixed(60000 * 256, 60000 * 128, 128)
    found = FAMILY["wgmma_stream"].why_not_config(many, SM90, config(stream_shape(256, 2, 1, 64, 4)))
    assert found == "3600000000 tiles cannot be counted in 32 bits"


def test_every_step_of_a_tile_has_one_block() -> None:
    """Follow the kernel's walk: whole tiles, helpers and owners together sum each step of each tile once."""
    for tiles, blocks, steps in itertools.product((1, 2, 5, 12, 13, 28, 160, 192), (1, 7, 13, 132), (1, 4, 31, 64)):
        for whole in (False, True):
            division = Division.of(tiles, steps, config(stream_shape(128, 3, 1, 64, 4), blocks=blocks, whole=whole))
            summed: dict[int, list[int]] = {tile: [0] * steps for tile in range(tiles)}
            for lead in (-9.0, 0.0, 3.3):
                head = division.head(lead) if division.divided else 0
                assert 0 <= head < max(steps, 1), (division, head)
            each, more = divmod(steps - head, division.parts - 1) if division.divided else (0, 0)
            assert division.helpers + division.divided <= division.blocks <= blocks, division
            for block in range(division.blocks):
                pieces = [(tile, 0, steps) for tile in range(division.divided + block, tiles, division.blocks)]
                if block < division.helpers:
                    part, tile = divmod(block, division.divided)
                    pieces.append((tile, head + part * each + min(part, more), each + (part < more)))
                elif block < division.helpers + division.divided:
                    pieces.append((block - division.helpers, 0, head))
                assert sum(count == steps for _, _, count in pieces) <= division.waves + (division.parts == 1)
                for tile, first, count in pieces:
                    assert count > 0
                    for step in range(first, first + count):
                        summed[tile][step] += 1
            assert all(count == [1] * steps for count in summed.values()), division


@pytest.mark.parametrize("k", [8, 520, 1024, 4096])
def test_each_step_of_a_dense_tile_is_summed_once(k: int) -> None:
    """Follow the kernel's walk. An owner waits for clusters with lower numbers, which sum the tile's earlier steps first of all."""
    tiles = itertools.product((1, 150, 333, 1500), (264, 4096), (7, 132), (dense_shape(64, 88), dense_shape(128, 176, 1, 2)))
    for m, n, blocks, shape in tiles:
        for whole, swap_ab in itertools.product((False, True), (False, True)):
            problem, one = mm(m, n, k), config(shape, blocks=blocks, whole=whole, swap_ab=swap_ab)
            division, (rows, cols) = DenseDivision.of(problem, one), dense_tiles_of(problem, one)
            assert division.clusters <= blocks // shape.cluster
            summed: dict[tuple[int, int], int] = {}
            for cluster_of in range(division.clusters):
                for tile, first, end in dense_pieces(division, work_each(problem, one), cluster_of, rows * cols):
                    earlier = {summed[tile, step] for step in range(first)} if end == division.steps else set()
                    assert earlier <= set(range(cluster_of - division.parts + 1, cluster_of))
                    assert first < end
                    assert not any((tile, step) in summed for step in range(first, end))
                    summed |= {(tile, step): cluster_of for step in range(first, end)}
            assert len(summed) == rows * cols * division.steps, (division, one)


def work_each(problem: Problem, one: Any) -> int:
    """Return the steps of a part that is not the owner's, as a launch passes them."""
    record = FAMILY["stream"].record(problem, one)
    return DenseWork.from_buffer_copy(record.parameters, record.arguments[1]).each


def dense_pieces(division: DenseDivision, each: int, cluster_of: int, tiles: int) -> list[tuple[int, int, int]]:
    """Return tile, first step and end of a cluster's pieces, in the kernel's order."""
    number, part = divmod(cluster_of, division.parts)
    own = [(number, part * each, division.steps if part + 1 == division.parts else (part + 1) * each)]
    own = own if number < division.shared else []
    whole = [(tile, 0, division.steps) for tile in range(division.shared + cluster_of, tiles, division.clusters)]
    return whole + own if part + 1 == division.parts else own + whole


@pytest.mark.parametrize(
    ("problem", "sizes", "told", "reason"),
    [
        (mm(), {"block_m": 256}, {},
         "got 256x128x64_s4, expected block_m of 64, 128 or 192, and block_n in multiples of 8 up to 256"),
        (mm(), {"block_n": 68}, {},
         "got 128x68x64_s8, expected block_m of 64, 128 or 192, and block_n in multiples of 8 up to 256"),
        (mm(), {"block_m": 192, "block_n": 192}, {},
         "got 192x192x64_s4, expected block_m of 64, 128 or 192, and block_n in multiples of 8 up to 176"),
        (mm(), {"block_m": 64, "block_n": 256}, {},
         "got 64x256x64_s5, expected block_m of 64, 128 or 192, and block_n in multiples of 8 up to 208"),
        (mm(), {}, {"blocks": 257}, "257 blocks, expected 1 to 256"),
        (mm(), {"cluster_m": 2}, {"blocks": 1}, "1 blocks, expected 2 to 256"),
        (mm(), {"block_n": 88, "cluster_m": 2}, {},
         "2 blocks copy 88 lines for each other, in parts that have to be multiples of 8"),
        (mm(layout="nn"), {"block_n": 96}, {},
         "an operand whose lines run across K is copied in lines of 64, and a tile has 96 columns"),
        (mm(), {"block_n": 16, "cluster_m": 4}, {},
         "4 blocks copy 16 lines for each other, in parts that have to be multiples of 8"),
    ],
)  # fmt: skip
def test_dense_config_is_refused(problem: Problem, sizes: dict[str, int], told: dict[str, int], reason: str) -> None:
    shape = dense_shape(**({"block_m": 128, "block_n": 128} | sizes))
    assert FAMILY["stream"].why_not_config(problem, SM90, config(shape, **told)) == reason


def test_batches_have_other_kernels_than_persistent_ones() -> None:
    assert FAMILY["stream"].why_not(bmm(3, 256, 256, 4096), SM90) == "a batch of 3 products, expected one"
