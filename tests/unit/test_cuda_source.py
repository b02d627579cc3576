"""Sources of the cuda families, launch records of problems, and use with and without a compiler."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_cases import (
    BF16,
    F16,
    F32,
    INT4,
    SM90,
    UINT4,
    addmm,
    biased,
    blocked,
    bmm,
    choice,
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
    narrow_shape,
    parts_shape,
    skinny_shape,
    stream_shape,
    wgmma_shape,
)

from gemmtune import settings
from gemmtune.backends.cuda import BACKEND
from gemmtune.backends.cuda import choice as cuda_choice
from gemmtune.backends.cuda.bsr.configs import SHAPES as BSR
from gemmtune.backends.cuda.bsr.family import Work as BsrWork
from gemmtune.backends.cuda.bsr_skinny.family import Shape as BsrSkinnyShape
from gemmtune.backends.cuda.bsr_skinny.family import Work as BsrSkinnyWork
from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.backends.cuda.cluster.family import Work as ClusterWork
from gemmtune.backends.cuda.gemv.family import Work as GemvWork
from gemmtune.backends.cuda.parts.family import Split
from gemmtune.backends.cuda.parts.family import Work as PartsWork
from gemmtune.backends.cuda.skinny.family import Work as SkinnyWork
from gemmtune.backends.cuda.stream.family import Work as DenseWork
from gemmtune.backends.cuda.wgmma_stream.family import Work as StreamWork
from gemmtune.errors import CompileError, UnavailableError
from gemmtune.problem import Problem
from gemmtune.selector.offers import offers_for
from gemmtune.toolchain import cubin
from gemmtune.toolchain.cubin import CubinCompiler
from gemmtune.toolchain.made_once import DamagedError
from gemmtune.toolchain.record import MAP_BYTES, OUT, WORKSPACE, A, B, Record, operand_at

LONG, SKINNY, WGMMA = cluster_shape("64x64x64_s6_k2_2x2"), skinny_shape(16, 128, 4, 2, 4), wgmma_shape(128, 2, 1, 128, 4)
GROUPS = INT4 | {"scales": "group_128"}


def source_of(problem: Problem, shape: Any) -> Any:
    return family_of(shape).source(problem, config(shape))


TEXTS: dict[str, list[tuple[Problem, Any]]] = {
    "cluster": [
        (mm(), LONG), (mm(), cluster_shape("64x64x64_s6_k4")), (mm(dtype=F16), LONG), (mm(layout="tn"), LONG),
        (mm(layout="nn"), LONG), (addmm(128, 128, 8192), LONG), (addmm(128, 128, 8192, bias="mn", dtype=BF16), LONG),
        (gated(mm()), LONG), (biased(mm()), LONG),
    ],
    "skinny": [
        (mixed(**GROUPS), SKINNY), (mixed(**GROUPS), skinny_shape(16, 64, 4, 2, 4)), (mixed(dtype=BF16, **GROUPS), SKINNY),
        (mixed(**UINT4, scales="group_128"), SKINNY), (mixed(scales="group_128"), SKINNY), (mixed(**INT4), SKINNY),
        (mixed(**GROUPS, zeros=True), SKINNY), (mixed(**GROUPS, scale_dtype=F32), SKINNY), (mixed(**INT4, scales="column"), SKINNY),
        (mixed(**INT4, scales="group_64"), SKINNY), (gated(mixed(**GROUPS)), SKINNY), (biased(mixed(**GROUPS)), SKINNY),
    ],
}  # fmt: skip
VECTOR = gemv_shape(8, 4, 8)
BY_PARTS = parts_shape(128, 64, 6, 4)
TEXTS["parts"] = [(mm(dtype=F32), BY_PARTS), (mm(dtype=F32), parts_shape(128, 128, 4, 4)), (mm(layout="tn", dtype=F32), BY_PARTS)]
TEXTS["parts"] += [
    (mm(dtype=F32), parts_shape(128, 64, 6, 4, halves=2)),
    (addmm(128, 128, 8192, dtype=F32), BY_PARTS),
    (gated(mm(dtype=F32)), BY_PARTS),
]
TEXTS["bsr"] = [(blocked(), BSR[0]), (blocked(), BSR[1]), (blocked(dtype=F16), BSR[0]), (blocked(layout="tt"), BSR[0])]
TEXTS["bsr"] += [(blocked(block=32), BSR[0]), (gated(blocked()), BSR[0]), (biased(blocked()), BSR[0])]
FEW = BsrSkinnyShape(block_n=16, warps=4, stages=2, stage_fragments=4)
TEXTS["bsr_skinny"] = [(blocked(16), FEW), (blocked(16), dataclasses.replace(FEW, stages=1)), (blocked(16, block=32), FEW)]
TEXTS["bsr_skinny"] += [(blocked(16, dtype=F16), FEW), (blocked(16, layout="tt"), FEW), (gated(blocked(16)), FEW)]
TEXTS["gemv"] = [(mm(1), VECTOR), (mm(1), gemv_shape(16, 4, 8)), (mm(1, dtype=F16), VECTOR), (addmm(2, 128, 8192), VECTOR)]
TEXTS["gemv"] += [(mixed(1, **fields), VECTOR) for fields in (GROUPS, INT4, {"scales": "column"}, UINT4, GROUPS | {"zeros": True})]
FEW_ROWS = narrow_shape(16, 32, 4)
TEXTS["narrow"] = [
    (mm(16), FEW_ROWS),
    (mm(16), narrow_shape(16, 16, 7)),
    (mm(16, dtype=F16), FEW_ROWS),
    (addmm(9, 128, 512), FEW_ROWS),
]
TEXTS["wgmma"] = [(problem, WGMMA if shape == SKINNY else wgmma_shape(64, 2, 1, 128, 4)) for problem, shape in TEXTS["skinny"]]

STREAM = stream_shape(128, 2, 1, 128, 4)
TEXTS["wgmma_stream"] = [(p, STREAM if shape == SKINNY else stream_shape(64, 3, 1, 128, 4)) for p, shape in TEXTS["skinny"]]

DENSE = dense_shape(128, 128)
TEXTS["stream"] = [(mm(), DENSE), (mm(), dense_shape(128, 112)), (mm(), dense_shape(192, 128)), (mm(), dense_shape(128, 128, 2))]
TEXTS["stream"] += [(mm(), dense_shape(64, 128)), (mm(), dense_shape(128, 88))]
TEXTS["stream"] += [(mm(dtype=F16), DENSE), (mm(layout="tn"), DENSE), (mm(layout="nn"), DENSE), (addmm(128, 128, 8192), DENSE)]
TEXTS["stream"] += [(gated(mm()), DENSE), (biased(mm()), DENSE)]

NARROW = mixed_groups(**GROUPS)
TEXTS["wgmma-groups"] = [(NARROW, WGMMA), (NARROW, wgmma_shape(144, 2, 1, 64, 4)), (mixed(**GROUPS, dtype=BF16), WGMMA)]
TEXTS["wgmma-groups"] += [(gated(NARROW), WGMMA), (mixed_groups(**INT4), WGMMA)]
ROWS, TERMS = (make(512, 512, 512, device_type="cuda") for make in (Problem.grouped_mm, Problem.grouped_k_mm))
TEXTS["grouped"] = [
    (ROWS, grouped_shape(128, 6)),
    (ROWS, grouped_shape(128, 5)),
    (ROWS, grouped_shape(128, 6, cluster_m=2)),
    (ROWS, grouped_shape(256, 4)),
    (ROWS, grouped_shape(128, 6, fitted=32)),
    (ROWS, grouped_shape(128, 4, block_m=256, fitted=16)),
    (TERMS, grouped_shape(128, 6)),
    (gated(ROWS), grouped_shape(128, 6)),
    (Problem.grouped_mm(512, 512, 512, layout="nn", device_type="cuda"), grouped_shape(128, 6)),
    (Problem.grouped_mm(512, 512, 512, dtype=F16, device_type="cuda"), grouped_shape(128, 6)),
]


@pytest.mark.parametrize("family", TEXTS)
def test_digest_follows_text_and_ignores_sizes(family: str) -> None:
    sources = [source_of(*case) for case in TEXTS[family]]
    assert len({one.text for one in sources}) == len({one.digest for one in sources}) == len(sources)
    for source in sources:
        assert not any(mark in source.text for mark in ("{{", "{%", "{#"))
        assert "#include" not in source.text
    other = {
        "bsr": blocked(99, 336, 528, density=0.3),
        "bsr_skinny": blocked(9, 336, 528, density=0.3),
        "cluster": mm(256, 300, 16384),
        "gemv": mm(4, 300, 16384),
        "narrow": mm(40, 300, 1000),
        "grouped": Problem.grouped_mm(99, 304, 776, groups=77, device_type="cuda"),
        "parts": mm(99, 301, 777, dtype=F32),
        "stream": mm(333, 1000, 520),
        "wgmma-groups": mixed_groups(999, 304, 4096, 77, **GROUPS),
    }
    again = other.get(family, mixed(13, 2048, 4096, **GROUPS))
    assert source_of(again, TEXTS[family][0][1]).digest == sources[0].digest


def test_text_has_shape_constants_and_one_epilogue() -> None:
    text = source_of(addmm(128, 128, 8192, bias="mn"), LONG).text
    assert "constexpr int BLOCK_M = 64, BLOCK_N = 64, BLOCK_K = 64;" in text
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16" in text
    steps = ["acc = acc * epilogue.scalars.alpha;", "acc = acc + epilogue.scalars.beta * x0;"]
    assert [text.count(step) for step in steps] == [1, 1]
    assert text.index(steps[0]) < text.index(steps[1])
    skinny = source_of(gated(mixed(scales="column")), SKINNY).text
    assert skinny.count("f_silu(") == 2, "once called, once defined"
    assert "value_of<f16>(epilogue.x[1], batch, row, col)" in skinny, "after the scale"


@pytest.mark.parametrize(("fused", "stored"), [(False, "using Staged = f16;"), (True, "using Staged = float;")])
def test_wgmma_stages_results_or_float_sums_for_epilogue(fused: bool, stored: str) -> None:
    problem = mixed(128, scales="column")
    text = source_of(gated(problem) if fused else problem, WGMMA).text
    assert stored in text
    assert text.count("read_column_scales(") == 2, "once, for a thread's own columns"


def work_of(record: Record, work: type[ctypes.Structure]) -> Any:
    assert len(record.parameters) == MAP_BYTES * len(record.maps) + ctypes.sizeof(work)
    assert record.arguments == (0, MAP_BYTES * len(record.maps))
    return work.from_buffer_copy(record.parameters, record.arguments[1])


def test_record_of_persistent_blocks() -> None:
    problem = mixed(1000, 5120, 4096, dtype=BF16, **GROUPS)
    whole, divided = (choice(problem, stream_shape(256, 2, 1, 64, 3), whole=whole).record for whole in (True, False))
    works = [work_of(record, StreamWork) for record in (whole, divided)]
    assert [(x.tiles_m, x.tiles_n, x.steps, x.strip) for x in works] == [(4, 40, 32, 8)] * 2
    assert [(x.divided, x.helpers) for x in works] == [(0, 0), (28, 84)]
    assert works[1].head + 3 * works[1].each + works[1].more == 32
    assert [record.grid for record in (whole, divided)] == [(132, 1, 1)] * 2
    assert (whole.workspace_bytes, divided.workspace_bytes) == (0, 2**14 + 84 * 256 * 128 * 4)


def test_flags_of_persistent_blocks_have_one_place_for_all_launches() -> None:
    """Check what lets launches for any M share a workspace: sums of one are never where another has flags."""
    for m, shape, blocks in itertools.product((130, 300, 1000, 5000), (stream_shape(256, 2, 1, 64, 3), STREAM), (7, 132, 256)):
        record = choice(mixed(m, 5120, 4096, scales="column"), shape, blocks=blocks).record
        places = {x.offset: x.more_bytes for x in record.addresses if x.operand == WORKSPACE}
        helpers = work_of(record, StreamWork).helpers
        assert [*places.values()] == ([0, 2**14] if helpers else [])
        assert helpers * shape.warp_groups * 4 * 4 <= 2**14
        assert record.workspace_bytes == (2**14 + helpers * shape.block_m * shape.block_n * 4 if helpers else 0)


def test_record_of_dense_persistent_blocks() -> None:
    problem, shape = mm(333, 4104, 4096), dense_shape(128, 176, cluster_n=2)
    whole, shared = (choice(problem, shape, swap_ab=True, whole=whole).record for whole in (True, False))
    works = [work_of(record, DenseWork) for record in (whole, shared)]
    assert [(x.rows, x.cols, x.tiles_m, x.tiles_n, x.steps) for x in works] == [(333, 4104, 1, 33, 64)] * 2
    assert [(x.shared, x.parts) for x in works] == [(0, 1), (33, 2)]
    assert [record.grid for record in (whole, shared)] == [(66, 1, 1), (132, 1, 1)]
    assert [x.lines for x in works] == [168, 168], "half of 333, rounded up to lines that swizzling repeats"
    assert [x.box for x in whole.maps] == [(64, 64, 1), (64, 168, 1)], "two blocks copy columns of b for each other"
    assert (whole.workspace_bytes, shared.workspace_bytes) == (0, 2**14 + 132 * 128 * 176 * 4)
    assert [x.more_bytes for x in shared.addresses if x.operand == WORKSPACE] == [0, 2**14]


@pytest.mark.parametrize(
    ("m", "swap_ab", "layout", "lines"),
    [(333, False, "nt", 112), (384, False, "nt", 128), (200, False, "nt", 104), (200, True, "nt", 72), (1, False, "nt", 8),
     (96, False, "nt", 96), (96, False, "tt", 128)],
)  # fmt: skip
def test_dense_tiles_have_equal_rows(m: int, swap_ab: bool, layout: str, lines: int) -> None:
    """Rows that lie across K are copied in whole lines of 64."""
    work = work_of(choice(mm(m, 4096, 4096, layout), dense_shape(128, 80), swap_ab=swap_ab).record, DenseWork)
    assert work.lines == lines
    assert (work.tiles_m - 1) * lines < m <= work.tiles_m * lines


def test_record_of_block_sparse_product() -> None:
    problem = blocked(200, 1040, 528)
    alone, shared = (choice(problem, shape, blocks=5).record for shape in BSR[:2])
    work = work_of(alone, BsrWork)
    assert (work.rows, work.cols, work.units, work.steps, work.words, work.paired) == (1040, 200, 33, 9, 3, True)
    assert (work.groups, work.tiles, work.fragments_at) == (5, 10, 896), "33 times 2 + 1 + 3 words, to the next 128 bytes"
    assert (alone.grid, alone.cluster) == ((5, 1, 1), 1)
    assert (shared.grid, shared.cluster) == ((4, 1, 1), 2)
    assert (work_of(shared, BsrWork).groups, work_of(shared, BsrWork).tiles) == (3, 6)
    assert [record.maps[0].box for record in (alone, shared)] == [(64, 128, 1), (64, 64, 1)]
    assert alone.maps[0].sizes == (528, 200, 1)

    transposed = choice(blocked(200, 1040, 528, layout="tt"), BSR[1]).record.maps[0]
    assert (transposed.sizes, transposed.box) == ((200, 528, 1), (64, 32, 1)), "half of the lines each"


def test_record_of_block_sparse_product_with_few_tokens() -> None:
    along_k, by_tokens = (choice(blocked(14, 1040, 528, layout=layout), FEW, pdl=True).record for layout in ("nt", "tt"))
    work = BsrSkinnyWork.from_buffer_copy(along_k.parameters)
    assert (work.rows, work.cols, work.tokens, work.columns, work.x_pitch, work.paired) == (14, 1040, 14, 33, 1056, True)
    assert (work.panel_bytes, work.fragments_at) == (256, 65 * 256), "eight words and 33 columns, to the next 128 bytes"
    assert (along_k.grid, along_k.threads, along_k.maps, along_k.pdl) == ((65, 1, 1), 128, (), True)
    assert [one.operand for one in along_k.addresses] == [OUT, A, B]
    assert dict(along_k.alignment) == {A: 8, B: 16}

    transposed = BsrSkinnyWork.from_buffer_copy(by_tokens.parameters)
    assert (transposed.rows, transposed.cols, transposed.x_pitch, dict(by_tokens.alignment)[A]) == (1040, 14, 28, 4)


def test_record_of_long_k() -> None:
    problem = mm(129, 257, 8192)
    shared, alone = (choice(problem, LONG, clusters_per_tile=n, swap_ab=n == 5, pdl=n == 5).record for n in (5, 1))
    tiles, warps = 24, 4
    counters = tiles * 2 * (8 + 4 * 5 * warps)
    parts_at = -(-counters // 128) * 128
    assert shared.workspace_bytes == parts_at + tiles * 5 * 64 * 64 * 4
    assert (shared.grid, shared.cluster, shared.threads, shared.pdl) == ((40, 3, 2), 8, 160, True)
    work = work_of(shared, ClusterWork)
    assert (work.rows, work.cols, work.steps, work.clusters_n, work.readers_log2) == (257, 129, 128, 2, 0)
    assert (work.out_strides.row, work.out_strides.col, work.paired) == (1, 257, False)
    assert [one.operand for one in shared.maps] == [B, A]
    assert [one.sizes for one in shared.maps] == [(8192, 257, 1), (8192, 129, 1)]
    places = {address.more_bytes for address in shared.addresses if address.operand == WORKSPACE}
    assert places == {0, 8 * tiles * 2, parts_at}
    assert (alone.workspace_bytes, alone.grid, alone.pdl) == (0, (8, 2, 3), False)
    assert not any(address.operand == WORKSPACE for address in alone.addresses)
    many = choice(mm(64, 64, 65536), cluster_shape("64x64x64_s6_k4"), clusters_per_tile=30).record
    assert work_of(many, ClusterWork).readers_log2 == 2
    assert choice(addmm(128, 128, 8192), LONG).record.scalars
    assert not shared.scalars


def test_record_of_skinny_product() -> None:
    problem = mixed(13, 1000, 4096, **INT4, scales="group_128", zeros=True)
    launched = {"cluster_k": 4, "interleaved_k": True, "pdl": True, "prefetch_stages": 6}
    record = choice(problem, skinny_shape(16, 128, 4, 2, 4), **launched).record
    work = work_of(record, SkinnyWork)
    assert (work.rows, work.cols, work.steps, work.cluster_k, work.interleaved_k, work.prefetch_stages) == (13, 1000, 16, 4, 1, 6)
    assert (work.out_strides.row, work.out_strides.col) == (1000, 1)
    assert [(x.strides.row, x.strides.col) for x in work.epilogue.x[:2]] == [(1000, 1), (1000, 1)]
    assert [(one.sizes, one.pitches, one.box) for one in record.maps] == [
        ((32, 13, 128), (8192, 64), (32, 16, 8)),
        ((2048, 1000), (2048,), (128, 128)),
        ((1000, 32), (2000,), (128, 2)),
        ((1000, 32), (2000,), (128, 2)),
    ]
    assert dict(record.alignment) == dict.fromkeys((A, B, operand_at(0), operand_at(1)), 16)
    assert [(flag.operand, flag.multiple_bytes) for flag in record.aligned] == [(OUT, 4)]
    one_scale = work_of(choice(mixed(1, 1000, 4096, scales="tensor"), skinny_shape(8, 64, 8, 2, 4)).record, SkinnyWork)
    assert (one_scale.epilogue.x[0].strides.row, one_scale.epilogue.x[0].strides.col) == (0, 0)


def test_record_of_gemv() -> None:
    problem = mixed(3, 1001, 4096, **INT4, scales="group_128", zeros=True)
    record = choice(problem, VECTOR, pdl=True, prefetch_stages=4).record
    work = GemvWork.from_buffer_copy(record.parameters)
    assert (work.rows, work.cols, work.row_bytes, work.prefetch_stages) == (3, 1001, 2048, 4)
    assert (work.a_pitch, work.b_pitch, work.out_strides.row) == (8192, 2048, 1001)
    assert [(x.strides.row, x.strides.col) for x in work.epilogue.x[:2]] == [(1001, 1), (1001, 1)]
    assert (record.grid, record.threads, record.shared_bytes, record.cluster, record.maps) == ((1, 126, 1), 256, 4096, 1, ())
    assert dict(record.alignment) == {A: 16, B: 16}
    assert [one.operand for one in record.addresses] == [OUT, operand_at(0), operand_at(1), A, B]
    biased = choice(addmm(1, 128, 256), VECTOR).record
    assert [one.number for one in biased.scalars] == [0, 1]
    assert [one.operand for one in biased.addresses] == [OUT, operand_at(0), A, B]


def test_record_of_float32_by_parts() -> None:
    record = choice(mm(300, 136, 1000, dtype=F32), parts_shape(128, 128, 5), blocks=132, pdl=True).record
    work = work_of(record, PartsWork)
    assert (work.rows, work.cols, work.tiles_m, work.tiles_n, work.tiles, work.steps, work.plane_lines) == (
        300,
        136,
        3,
        2,
        6,
        32,
        136,
    )
    assert (record.grid, record.cluster, record.threads, record.pdl) == ((6, 1, 1), 1, 384, True)
    assert [(one.operand, one.sizes, one.pitches, one.box) for one in record.maps] == [
        (A, (1000, 300, 1), (4000, 1200000), (32, 128, 1))
    ]
    assert record.scratch_bytes == 32 * 3 * 136 * 64
    [first] = record.before
    split = Split.from_buffer_copy(first.parameters)
    assert (first.kernel, first.grid, first.threads) == ("gemmtune_parts_split", (3 * 16, 1, 1), 256)
    assert (split.q.lines, split.q.k, split.q_blocks, split.steps, split.plane_lines) == (136, 1000, 48, 32, 136)
    assert [one.operand for one in first.addresses] == [WORKSPACE, WORKSPACE, B, A]


def test_copies_operand_that_tma_cannot_read() -> None:
    record = choice(bmm(2, 9, 17, 75, dtype=F32), parts_shape(64, 64, 9, 2), swap_ab=True).record
    [first] = record.before
    split, planes_at = Split.from_buffer_copy(first.parameters), 11264
    assert (split.p.lines, split.p_pitch, split.q.lines, split.q_blocks, first.grid) == (17, 76, 9, 4, (8, 1, 1))
    assert planes_at >= 2 * 17 * 76 * 4
    assert [one.more_bytes for one in first.addresses] == [planes_at, 0, 0, 0]
    assert [(one.operand, one.sizes, one.pitches) for one in record.maps] == [(WORKSPACE, (75, 17, 2), (304, 5168))]
    assert record.scratch_bytes == planes_at + 2 * 4 * 3 * 16 * 64
    assert record.alignment == ()


def test_packed_weight_needs_one_launch() -> None:
    one = choice(dataclasses.replace(mm(64, 100, 200, dtype=F32), prepacked=True), parts_shape(64, 64, 9))
    assert one.pack(torch.empty(200, 100)).shape == (8, 3, 104, 32)
    assert (one.record.before, one.record.scratch_bytes, dict(one.record.alignment)) == ((), 0, {A: 16, B: 16})
    swapped = choice(one.problem, parts_shape(64, 64, 9), swap_ab=True)
    assert (swapped.packed_format, len(swapped.record.before)) == (None, 1)


# Compilation


class FakeCompiler:
    """Compiler that only counts and records its sources."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.error: Exception | None = None

    def compile(self, text: str, arch: str, made: Path, name: str) -> None:
        assert arch == "sm_90a"
        self.texts.append(text)
        if self.error is not None:
            raise self.error
        made.write_bytes(b"\x7fELF" + bytes(100))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = FakeCompiler()
    monkeypatch.setattr(cubin, "_nvrtc", lambda: CubinCompiler(name="NVRTC 13.0", compile=fake.compile))
    with settings.patch(cache_dir=str(tmp_path), backends=("cuda",)):
        yield fake


def missing(reason: str) -> Callable[[], CubinCompiler]:
    def find() -> CubinCompiler:
        raise UnavailableError(reason)

    return find


@pytest.mark.parametrize(
    ("problems", "shape"),
    [
        ((mm(), mm(100, 120, 32768)), LONG),
        ((mixed(scales="column"), mixed(11, 1000, 2064, scales="column")), SKINNY),
        ((mm(1), mm(4, 100, 136)), VECTOR),
        ((mm(dtype=F32), mm(100, 120, 999, dtype=F32)), BY_PARTS),
        ((mixed(64, scales="column"), mixed(51, 1000, 2064, scales="column")), WGMMA),
        ((gated(mm()), gated(mm(100, 120, 8192))), LONG),
    ],
)
def test_compiles_shape_once_for_all_sizes_and_launches(compiler: FakeCompiler, problems: Any, shape: Any) -> None:
    same = [variant for problem in problems for one in [choice(problem, shape)] for variant in (one, *one.launch_variants())]
    assert {one.compile_key for one in same} == {same[0].compile_key}
    assert not same[0].compiled
    for one in same:
        one.compile()
        assert one.compiled
    assert len(compiler.texts) == 1


def test_refused_source_raises_compile_error_and_leaves_no_file(compiler: FakeCompiler) -> None:
    one = choice(mm(), LONG)
    compiler.error = CompileError(one.name, "kernel.cu(1): error")
    with pytest.raises(CompileError, match=r"kernel\.cu\(1\): error"):
        one.compile()
    assert not one.compiled


def test_recompiles_damaged_cubin(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.toolchain.compiled.find_cuobjdump", lambda: None)
    one = choice(mm(), LONG)
    one.compile()
    one.path.write_bytes(b"\x7fEL")
    one.artifacts(SM90)
    assert len(compiler.texts) == 2
    assert one.path.read_bytes().startswith(b"\x7fELF")


def test_recompiles_cubin_that_the_driver_refuses(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    one, refused = choice(mm(), LONG), [1]

    def loaded(driver: object, path: Path, kernel: str, device: int) -> str:
        if refused[0]:
            refused[0] -= 1
            raise DamagedError("the CUDA driver: CUDA error 209: no kernel image is available")
        return kernel

    monkeypatch.setattr(cuda_choice, "find_driver", object)
    monkeypatch.setattr(cuda_choice, "loaded_kernel", loaded)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert one.load() == {name: name for name in one.source.kernels}
    assert len(compiler.texts) == 2
    refused[0] = 2
    with pytest.raises(UnavailableError, match="the compiled file cannot be loaded here: the CUDA driver: CUDA error 209"):
        one.load()


def test_without_compiler_uses_existing_cubins_and_refuses_others(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, chosen = mm(128, 128, 16384), settings.current()
    assert BACKEND.available(SM90).detail == "compiles with NVRTC 13.0"
    first, *others = offers_for(problem, SM90, chosen).choices
    first.compile()
    for name, reason in (("_nvrtc", "there is no libnvrtc"), ("_nvcc", "nvcc is not on PATH")):
        monkeypatch.setattr(cubin, name, missing(reason))
    none = f"no compiler for CUDA C++ (there is no libnvrtc; nvcc is not on PATH): {cubin.REMEDY}"
    assert BACKEND.available(SM90).detail == f"only kernels that were compiled before: {none}"
    found = offers_for(problem, SM90, chosen)
    assert list(found.choices) == [first]
    assert {r.name: r.reason for r in found.refusals}.items() >= {one.name: none for one in others}.items()
    assert isinstance(others[0], CudaChoice)
    with pytest.raises(UnavailableError, match="pip install nvidia-cuda-nvrtc"):
        others[0].compile()


def test_falls_back_to_nvcc(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin, "_nvrtc", missing("there is no libnvrtc"))
    monkeypatch.setattr(cubin, "_nvcc", lambda: CubinCompiler(name="nvcc 13.0", compile=compiler.compile))
    assert BACKEND.available(SM90).detail == "compiles with nvcc 13.0"
    choice(mm(), LONG).compile()
    assert len(compiler.texts) == 1


def test_tensor_maps_use_driver_numbers_of_dtypes() -> None:
    assert [one.data_type for one in choice(mixed(scales="group_128", scale_dtype=F32), SKINNY).record.maps] == [6, 0, 7]
    assert [one.data_type for one in choice(mm(), LONG).record.maps] == [9, 9]
