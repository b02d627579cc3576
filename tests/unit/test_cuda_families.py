"""Offers of the cuda families: configs for each problem, their order, and the claims of choices."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from cuda_cases import (
    BF16,
    F16,
    F32,
    FAMILY,
    INT4,
    SM90,
    WEIGHTS,
    blocked,
    choice,
    cluster_shape,
    config,
    dense_shape,
    family_of,
    grouped_shape,
    mixed,
    mixed_groups,
    mm,
    parts_shape,
    skinny_shape,
    wgmma_shape,
)

from gemmtune.backends.by_parts import why_not_one_by_one
from gemmtune.backends.cuda import BACKEND
from gemmtune.backends.cuda import choice as choices_module
from gemmtune.backends.cuda.bsr import configs as bsr
from gemmtune.backends.cuda.bsr_skinny import family as bsr_skinny
from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.backends.cuda.cluster import configs as cluster
from gemmtune.backends.cuda.cluster.rank import cluster_counts
from gemmtune.backends.cuda.gemv import family as gemv
from gemmtune.backends.cuda.groups import tiles_below
from gemmtune.backends.cuda.hopper import clusters_at_a_time
from gemmtune.backends.cuda.narrow import family as narrow
from gemmtune.backends.cuda.parts import configs as parts
from gemmtune.backends.cuda.skinny import family as skinny
from gemmtune.backends.cuda.stream import configs as stream
from gemmtune.backends.cuda.stream.configs import Division
from gemmtune.backends.cuda.wgmma import configs as wgmma
from gemmtune.backends.cuda.wgmma_stream import family as wgmma_stream
from gemmtune.choice import Offers
from gemmtune.device import DeviceInfo, preset
from gemmtune.effort import EFFORT
from gemmtune.errors import UnavailableError
from gemmtune.problem import Problem
from gemmtune.settings import Settings


def offered(family: str, problem: Problem, search: str = "default", device: DeviceInfo = SM90) -> Offers:
    return choices_module.offers(FAMILY[family], problem, device, Settings(search=search))  # type: ignore[arg-type]


def choices(family: str, problem: Problem, search: str = "default") -> list[CudaChoice]:
    return [one for one in offered(family, problem, search).choices if isinstance(one, CudaChoice)]


def estimate_us(one: CudaChoice) -> float:
    return one.family.estimate_us(one.problem, SM90, one.config)


int4 = INT4 | {"scales": "group_128"}
FASTEST: list[tuple[Problem, tuple[str, ...]]] = [
    (mm(128, 128, 65536), ("cluster_64x64x128_s6_k2_2x2_g15_pdl",)),
    (
        mm(64, 64, 65536),
        (
            "cluster_64x64x64_s6_k8_g15_pdl",
            "cluster_64x64x64_s6_k4_g30_pdl",
        ),
    ),
    (mm(96, 96, 32768), ("cluster_64x96x64_s10_k4_2x1_g15_pdl",)),
    (mm(128, 128, 16384), ("cluster_64x64x64_s6_k2_2x2_g15_pdl6",)),
    (mm(128, 128, 8192), ("cluster_64x64x64_s6_k2_2x2_g15_pdl6",)),
    (mm(200, 136, 8192), ("cluster_64x64x64_s6_k8_g1_pdl",)),
    (mm(100, 100, 100000), ("cluster_128x64x64_s8_k2_1x2_g30_pdl",)),
    (
        mm(256, 256, 16384),
        (
            "cluster_128x64x64_s8_k1_2x2_g15_pdl",
            "cluster_128x64x64_s8_k2_1x2_g7_pdl",
        ),
    ),
    (mm(64, 4096, 14336), ("cluster_64x64x64_s12_k2_g1_pdl",)),
    (mm(128, 4096, 14336), ("cluster_128x64x64_s8_k2_g1_pdl4",)),
    (mm(112, 2048, 7168), ("cluster_64x160x64_s7_k4_2x1_g1_pdl3",)),
    (mm(16, 4096, 14336), ("cluster_64x16x128_s5_k2_g2_swap_pdl",)),
    (mm(8, 1024, 4096), ("cluster_64x16x128_s5_k2_g4_swap_pdl",)),
    (mm(24, 2048, 8192), ("cluster_64x32x128_s4_k2_g2_swap_pdl",)),
    (mm(16, 6144, 4096), ("cluster_128x16x64_s6_k2_g1_swap_pdl",)),
    (mm(32, 6144, 4096), ("cluster_128x32x64_s5_k2_g1_swap_pdl",)),
    (mixed(16, 8192, 8192, **int4), ("skinny_i4_16x128x256_s4_w2x2_k2_interleaved_pdl4",)),
    (mixed(16, 4096, 14336, **int4), ("skinny_i4_16x64x256_s8_w2x4_k2_pdl",)),
    (mixed(16, 6144, 4096, **int4), ("skinny_i4_16x128x256_s4_w2x2_k2_interleaved_pdl4",)),
    (mixed(1, 8192, 8192, **int4), ("skinny_i4_8x256x256_s3_w4x2_k3_pdl",)),
    (mixed(16, 8192, 8192, scales="column"), ("skinny_i8_16x128x128_s8_w2x4_k2_pdl",)),
    (mixed(16, 4096, 14336, scales="column"), ("skinny_i8_16x128x128_s8_w2x4_k3_pdl",)),
    (
        mixed(64, 8192, 8192, scales="column"),
        (
            "wgmma_i8_64x128x128_s4_w2t1b2_k2_pdl4",
            "wgmma_i8_64x64x128_s4_w1t1b4_r2_k2_pdl4",
        ),
    ),
]


@pytest.mark.parametrize(("problem", "wanted"), FASTEST, ids=str)
def test_search_offers_configs_that_were_fastest_on_h200(problem: Problem, wanted: tuple[str, ...]) -> None:
    family = wanted[0].split("_")[0]
    found = choices(family, problem)
    names = {variant.name.removeprefix("cuda:") for one in found for variant in (one, *one.launch_variants())}
    assert names >= set(wanted)
    assert len({one.config.shape for one in found}) == len(found) <= EFFORT["default"].configs[f"cuda:{family}"]
    assert choices(family, problem, "quick") == found[:2] or family == "cluster"
    assert max(map(estimate_us, found)) <= FAMILY[family].likely * min(map(estimate_us, found))


@pytest.mark.parametrize(
    ("family", "problem", "search", "reason"),
    [
        ("cluster", mm(128, 128, 2048), "default", "K is 2048, tried from 4096 on"),
        ("cluster", mm(384, 128, 65536), "default", "a result of 384x128: tried with up to 256x256, or 64 rows or columns"),
        ("cluster", mm(64, 8192, 8192), "default", "the result has 128 tiles of 64x64, tried with up to 66"),
        ("cluster", mm(64, 6144, 4096), "default", "the result has 96 tiles of 64x64, tried with up to 66"),
        ("cluster", mm(128, 5120, 17408), "default", "the result has 80 tiles of 128x64, tried with up to 66"),
        ("cluster", mm(128, 2048, 4096), "default", "a result of 128x2048: tried with up to 256x256, or 64 rows or columns"),
        ("cluster", mm(16, 6144, 1016), "default", "K is 1016, tried from 1024 on"),
        ("cluster", mm(16, 28672, 8192), "default", "the result has 448 tiles of 64x64, tried with up to 66"),
        ("cluster", mm(128, 128, 4096), "quick", "K is 4096, tried from 8192 on"),
        ("stream", mm(96, 4096, 7168), "default", "a has 96 rows, tried from 97 to 1536"),
        ("stream", mm(31, 8192, 8192), "default", "a has 31 rows, tried from 32 to 1536"),
        ("stream", mm(512, 500, 8192), "default", "b has 8192000 bytes, tried from 8388608 on"),
        ("gemv", mm(5), "exhaustive", "a has 5 rows, at most 4 are served"),
        ("narrow", mm(97), "exhaustive", "a has 97 rows, at most 96 are served"),
        ("narrow", mm(4), "default", "a result of 4x128: tried from 5 rows on and with up to 3072 columns"),
        ("skinny", mixed(33), "exhaustive", "a has 33 rows, at most 32 are served"),
        ("wgmma", mixed(8), "default", "a has 8 rows, tried from 9 on"),
        ("wgmma", mixed_groups(250), "default", "a group has, on the mean, 32 rows, tried from 33 on"),
    ],
)
def test_unlikely_family_is_one_refusal(family: str, problem: Problem, search: str, reason: str) -> None:
    found = offered(family, problem, search)
    assert not found.choices
    assert [(refusal.name, refusal.reason) for refusal in found.refusals] == [(f"cuda:{family}", reason)]


def test_backend_has_all_families() -> None:
    problem = mixed(8, 8192, 8192, scales="column")
    found = BACKEND.enumerate(problem, SM90, Settings())
    assert found.choices == tuple(choices("skinny", problem))
    refused = ["bsr", "bsr_skinny", "cluster", "gemv", "grouped", "narrow", "parts", "stream", "wgmma", "wgmma_stream"]
    assert [refusal.name for refusal in found.refusals] == [f"cuda:{name}" for name in refused]
    few = mixed(4, 8192, 8192, scales="column")
    assert BACKEND.enumerate(few, SM90, Settings()).choices == (*choices("gemv", few), *choices("skinny", few))


def test_float32_by_parts_needs_the_setting() -> None:
    problem = mm(512, 512, 512, dtype=F32)
    assert BACKEND.enumerate(problem, SM90, Settings()).choices == tuple(choices("parts", problem))
    assert not BACKEND.enumerate(problem, SM90, Settings(float32_by_parts=False)).choices


def test_long_k_of_few_tiles_is_gathered_where_torch_splits_k() -> None:
    few, many = mm(256, 256, 16384, dtype=F32), mm(4096, 4096, 4096, dtype=F32)
    whole, gathering = config(parts_shape(128, 128, 5)), config(parts_shape(128, 64, 7))
    keeping = config(parts_shape(128, 128, 4, halves=2, keeps=True))
    reason = FAMILY["parts"].why_not_config(few, SM90, whole)
    assert reason == why_not_one_by_one(few, SM90, 16384)
    assert FAMILY["parts"].why_not_config(few, SM90, gathering) is None
    assert FAMILY["parts"].why_not_config(few, SM90, keeping) is None
    short = FAMILY["parts"].why_not_config(mm(256, 256, 1024, dtype=F32), SM90, keeping)
    assert short == "keeps needs over 32 steps and 1 block, got 32 and 1"
    assert FAMILY["parts"].why_not_config(many, SM90, whole) is None


def test_blocks_of_a_tile_divide_its_columns_evenly() -> None:
    problem = mm(16, 4096, 4096, dtype=F32)
    one, four = (config(parts_shape(128, 16, 10, blocks)) for blocks in (2, 4))
    assert FAMILY["parts"].why_not_config(problem, SM90, one) is None
    assert FAMILY["parts"].why_not_config(problem, SM90, four) == "2 columns of eight cannot be divided evenly among 4 blocks"


@pytest.mark.parametrize(
    ("family", "problem", "shapes"),
    [
        ("bsr", blocked(512, 4096, 4096), bsr.SHAPES),
        ("bsr_skinny", blocked(9, 4096, 4096, imbalance="skewed"), [shape for shape in bsr_skinny.SHAPES if shape.block_n == 16]),
        ("cluster", mm(256, 256, 2048), (*cluster.SHAPES, *cluster.MIDDLE, *cluster.ONE_RUN)),
        ("gemv", mm(1, 1024, 16384), gemv.SHAPES),
        ("narrow", mm(40, 1536, 7168), narrow.SHAPES),
        ("skinny", mixed(9, 8192, 8192, **INT4), [shape for shape in skinny.SHAPES if shape.block_m == 16]),
        ("parts", mm(8192, 8192, 8192, dtype=F32), parts.SHAPES),
        ("stream", mm(333, 8192, 8192), stream.SHAPES),
        ("wgmma", mixed(16, 8192, 8192, **INT4), wgmma.SHAPES[4]),
        ("wgmma_stream", mixed(300, 8192, 8192, **INT4), wgmma_stream.SHAPES[4]),
    ],
)
def test_exhaustive_search_has_every_legal_shape(family: str, problem: Problem, shapes: list[Any]) -> None:
    found = choices(family, problem, "exhaustive")
    legal = [shape for shape in shapes if FAMILY[family].why_not_config(problem, SM90, config(shape)) is None]
    assert {one.config.shape for one in found} == set(legal)
    assert len(found) > len(legal) or family in ("bsr", "bsr_skinny", "gemv", "narrow"), "each in several ways"
    assert len({one.name for one in found}) == len({one.content_hash for one in found}) == len(found)
    times = [estimate_us(one) for one in found]
    assert times == sorted(times)
    assert max(times) > FAMILY[family].likely * min(times)


def test_illegal_configs_are_counted_by_reason() -> None:
    found = offered("cluster", mm(136, 136, 8192, "tn"))
    assert found.choices
    reason = "an operand whose lines run across K is copied in lines of 64, and a tile has {} columns"
    assert {(r.name, r.count, r.reason) for r in found.refusals} == {
        (f"cuda:cluster:{count} configs", count, reason.format(columns))
        for columns, count in ((160, 2), (96, 2), (48, 6), (32, 10), (16, 10))
    }
    small = dataclasses.replace(SM90, smem_per_block_bytes=64 * 1024)
    refused = offered("skinny", mixed(32, **INT4), device=small)
    assert not refused.choices
    reasons = Counter({refusal.reason: refusal.count for refusal in refused.refusals})
    assert reasons.total() == len(FAMILY["skinny"].candidates(mixed(32, **INT4), small))
    assert all("of shared memory, a block has 65536" in reason for reason in reasons)


@pytest.mark.parametrize("arch", ["sm80", "sm100", "gfx942", "avx2"])
def test_serves_only_sm90(arch: str) -> None:
    device = preset(arch)
    assert not BACKEND.serves_by_default(device)
    assert BACKEND.serves_by_default(SM90)
    assert BACKEND.available(device).ok is (device.type == "cuda")
    kind = "cpu" if device.type == "cpu" else "cuda"  # torch uses the name for AMD's GPUs too
    assert not BACKEND.enumerate(Problem.mm(64, 64, 8192, device_type=kind), device, Settings()).choices


GROUPED_UP = Problem.grouped_mm(8192, 14336, 4096, groups=8, device_type="cuda")
OFFERED = [("cluster", mm(256, 256, 16384)), *(("skinny", mixed(16, 8192, 8192, **fields)) for fields in WEIGHTS)]
OFFERED += [("gemv", mm(1, 8192, 8192)), ("gemv", mixed(3, 8192, 8192, **int4)), ("narrow", mm(16, 1536, 7168))]
OFFERED += [("grouped", GROUPED_UP), ("grouped", Problem.grouped_k_mm(4096, 14336, 8192, groups=8, device_type="cuda"))]
OFFERED += [("parts", mm(512, 512, 4096, dtype=F32)), ("parts", mm(8192, 8192, 8192, dtype=F32))]
OFFERED += [("stream", mm(333, 28672, 4096)), ("stream", mm(512, 5120, 5120, dtype=F16))]
OFFERED += [("wgmma", mixed(m, 8192, 8192, **fields)) for m, fields in zip((33, 64, 256, 1000, 4096), WEIGHTS, strict=True)]
OFFERED += [("wgmma", mixed_groups(2048, 28672, 4096, **int4)), ("wgmma", mixed_groups(4096, 1536, 2048, 64, dtype=F16))]
OFFERED += [
    ("wgmma_stream", mixed(m, 5120, 4096, **fields)) for m, fields in zip((300, 512, 1024, 1000, 4096), WEIGHTS, strict=True)
]
OFFERED += [("bsr", blocked(4096, 4096, 4096)), ("bsr", blocked(256, 4096, 4096, block=32))]
OFFERED += [("bsr_skinny", blocked(16, 14336, 4096, density=0.5)), ("bsr_skinny", blocked(32, 4096, 4096, block=32, layout="tt"))]


def test_dense_block_sparse_weights_need_exhaustive_search() -> None:
    [refusal] = offered("bsr", blocked(density=0.5)).refusals
    assert refusal.reason == "density is 0.5, at most 0.4 is tried: set search to exhaustive to try more"
    assert choices("bsr", blocked(density=0.5), "exhaustive")


@pytest.mark.parametrize(("family", "problem"), OFFERED, ids=str)
def test_launch_variants_need_no_compilation(family: str, problem: Problem) -> None:
    for one in choices(family, problem)[:5]:
        near = one.launch_variants()
        assert {variant.compile_key for variant in near} == {one.compile_key}
        assert len({v.content_hash for v in (one, *near)}) == len({v.name for v in (one, *near)}) == len(near) + 1
        for field in ("pdl",) if family in ("bsr", "bsr_skinny", "parts") or problem.groups else ("pdl", "prefetch_stages"):
            assert {bool(getattr(variant.config, field)) for variant in (one, *near)} == {True, False}
        assert all(FAMILY[family].why_not_config(problem, SM90, variant.config) is None for variant in near)


TRAVEL = [*OFFERED[:1], *OFFERED[4:5], *OFFERED[9:10], *OFFERED[-2:], ("gemv", mixed(1, **int4))]


@pytest.mark.parametrize(("family", "problem"), TRAVEL, ids=str)
def test_choice_pickles_and_runs_only_on_its_architecture(family: str, problem: Problem) -> None:
    one = choices(family, problem)[0]
    travelled = pickle.loads(pickle.dumps(one))
    assert travelled == one
    assert (travelled.content_hash, travelled.compile_key, travelled.arch) == (one.content_hash, one.compile_key, "sm90")
    assert travelled.record == one.record
    with pytest.raises(UnavailableError, match="got a newer GPU, expected sm90"):
        one.forward()


@pytest.mark.parametrize(
    ("family", "problem", "splits", "weights"),
    [
        ("cluster", mm(256, 256, 16384), lambda c: c.clusters_per_tile * c.shape.cluster_k, None),
        ("gemv", mm(2, 4096, 4096), lambda c: 2 * c.shape.warps, None),
        ("gemv", mixed(4, dtype=BF16, **INT4, scales="group_128", zeros=True), lambda c: 2 * c.shape.warps, BF16),
        ("bsr_skinny", blocked(16, 4096, 4096), lambda c: c.shape.warps, None),
        ("narrow", mm(16, 1536, 7168), lambda c: 1, None),
        ("parts", mm(128, 1024, 4096, dtype=F32), lambda c: c.shape.cluster_k, None),
        ("skinny", mixed(**INT4, scales="group_128"), lambda c: c.cluster_k * c.shape.warps_k, None),
        ("stream", mm(200, 4096, 14336), lambda c: Division.of(mm(200, 4096, 14336), c).parts, None),
        ("skinny", mixed(**INT4, scales="column", zeros=True), lambda c: c.cluster_k * c.shape.warps_k, F16),
        ("wgmma", mixed(64, scales="column"), lambda c: c.cluster_k, None),
        ("wgmma", mixed(64, dtype=BF16, scales="group_64"), lambda c: c.cluster_k, BF16),
        ("wgmma", mixed_groups(scales="column"), lambda c: c.cluster_k, None),
        ("wgmma", mixed_groups(scales="group_64"), lambda c: c.cluster_k, BF16),
    ],
)
def test_claims(family: str, problem: Problem, splits: Any, weights: torch.dtype | None) -> None:
    """Weights are rounded if zero points are subtracted and, with warp-group products, if scales change along K."""
    for one in choices(family, problem):
        for variant in (one, *one.launch_variants()):
            claims = variant.claims
            assert (claims.accumulate, claims.partials, claims.epilogue_input) == (F32, F32, F32)
            assert (claims.splits, claims.weights) == (splits(variant.config), weights)
            assert variant.info["splits"] == claims.splits
            assert (claims.input_mode, claims.promoted_every) == (("parts", 32) if family == "parts" else ("ieee", None))


def test_divided_tiles_claim_their_parts_and_no_batch_invariance() -> None:
    problem = mixed(1024, 5120, 4096, dtype=BF16, **int4)
    shape = wgmma_stream.SHAPES[4][-1]
    whole, divided = (choice(problem, shape, whole=whole) for whole in (True, False))
    alone = choice(problem, wgmma_shape(256, 2, 1, 64, 3))
    assert (whole.claims, whole.batch_invariant) == (alone.claims, True)
    assert (divided.claims.splits, divided.info["splits"], divided.batch_invariant) == (4, 4, False)
    assert divided.claims.reduction is None


def test_shared_dense_tiles_claim_their_parts_and_no_batch_invariance() -> None:
    whole, shared = (
        choice(mm(200, 4096, 14336), dense_shape(128, 112, 1, 2), swap_ab=True, whole=whole) for whole in (True, False)
    )
    assert (whole.claims.splits, whole.batch_invariant) == (1, True)
    assert str(whole.claims.reduction) == "matrix, K in one run"
    assert (shared.claims.splits, shared.info["splits"], shared.batch_invariant) == (2, 2, False)
    assert shared.claims.reduction is None


@pytest.mark.parametrize(("n", "k", "whole"), [(4096, 14336, False), (28672, 4096, True)])
def test_dense_tiles_are_shared_where_whole_ones_leave_blocks_idle(n: int, k: int, whole: bool) -> None:
    first = choices("stream", mm(256, n, k))[0]
    assert (first.config.whole, first.claims.splits == 1, first.record.workspace_bytes == 0) == (whole, whole, whole)


def test_divided_tiles_are_offered_where_whole_ones_leave_blocks_idle() -> None:
    idle, full = (choices("wgmma_stream", mixed(1024, n, 4096, dtype=BF16, **int4)) for n in (5120, 4224))
    assert [one.config.whole for one in idle][:1] == [False]
    assert full[0].claims.splits == 1
    assert full[0].record.workspace_bytes == 0 < idle[0].record.workspace_bytes


ROWS_AND_TILES = [
    (16, 14336, 4096, 8, True, 16),
    (128, 14336, 4096, 8, True, 32),
    (1024, 14336, 4096, 8, True, 256),
    (1024, 768, 2048, 128, True, 16),
    (8192, 14336, 4096, 8, True, 160),
]


@pytest.mark.parametrize(("m", "n", "k", "groups", "swap_ab", "most"), ROWS_AND_TILES)
def test_tiles_of_grouped_products_fit_groups(m: int, n: int, k: int, groups: int, swap_ab: bool, most: int) -> None:
    """Check that groups with few rows use swap_ab, and that fitted tiles with swap_ab compete with unswapped ones."""
    found = choices("grouped", Problem.grouped_mm(m, n, k, groups=groups, device_type="cuda"))
    assert [one.config.swap_ab for one in found] != [most > 32] * len(found)
    assert 2 <= len(found) <= EFFORT["default"].configs["cuda:grouped"]
    assert (found[0].config.swap_ab, found[0].config.shape.block_n) == (swap_ab, most)


def test_grouped_grid_is_limited_by_tiles_and_multiprocessors() -> None:
    shape = grouped_shape(256, 4, cluster_m=2)
    few, many = (Problem.grouped_mm(m, 512, 64, groups=3, device_type="cuda") for m in (1, 100000))
    grids = [FAMILY["grouped"].record(one, config(shape, blocks=132)).grid for one in (few, many)]
    assert grids == [(2 * 2, 1, 1), (132, 1, 1)]


@pytest.mark.parametrize(("rows", "most"), [(40, 64), (128, 192), (256, 192), (1000, 192)])
def test_tiles_of_narrow_weights_fit_groups(rows: int, most: int) -> None:
    """Check that about 256 rows take two tiles of 144 and not three of 128, and that other architectures get nothing."""
    problem = mixed_groups(8 * rows, 28672, 4096, **int4)
    found = choices("wgmma", problem)
    assert 1 <= len(found) <= EFFORT["default"].configs["cuda:wgmma"]
    assert max(one.config.shape.block_m for one in found) <= most
    assert found[0].config.shape.block_m == {40: 64, 128: 144, 256: 144}.get(rows, found[0].config.shape.block_m)
    assert BACKEND.enumerate(problem, SM90, Settings()).choices == tuple(found)
    assert not any(BACKEND.enumerate(problem, preset(arch), Settings()).choices for arch in ("sm80", "sm100", "gfx942"))


def test_grid_of_narrow_weights_covers_maximum_tiles() -> None:
    shape = wgmma_shape(64, 2, 1, 64, 4)
    few, many = (mixed_groups(m, 520, 1024, 3, **int4) for m in (2, 1000))
    assert FAMILY["wgmma"].record(few, config(shape)).grid == (2 * 5, 1, 1)
    assert FAMILY["wgmma"].record(many, config(shape, cluster_k=2)).grid == (2 * (15 + 3) * 5, 1, 1)


@pytest.mark.parametrize(("m", "groups", "rows"), [(2048, 8, 128), (2048, 8, 160), (300, 40, 16), (7, 100, 64), (90, 1, 64)])
def test_expected_tiles_of_random_groups(m: int, groups: int, rows: int) -> None:
    counts = torch.multinomial(torch.ones(2000, groups), m, replacement=True, generator=torch.Generator().manual_seed(1))
    sizes = torch.zeros(2000, groups).scatter_add_(1, counts, torch.ones(counts.shape))
    mean = (sizes / rows).ceil().sum(1).mean().item()
    assert tiles_below(mixed_groups(m, groups=groups), rows) == pytest.approx(mean, rel=0.03)


def test_cluster_counts_fill_multiprocessors_without_idle_blocks() -> None:
    assert [clusters_at_a_time(132, blocks) for blocks in (1, 2, 4, 8)] == [132, 66, 30, 15]
    eight = cluster_shape("64x64x64_s6_k8")
    assert cluster_counts(eight, 1, mm(128, 128, 65536), SM90) == (15,)
    assert cluster_counts(eight, 2, mm(128, 256, 65536), SM90) == (7, 8)
    assert cluster_counts(eight, 1, mm(128, 128, 8192), SM90) == (4,)
    assert cluster_counts(eight, 1, mm(128, 128, 512), SM90) == (1,)
    for tile_clusters in range(1, 200):
        for one in cluster.SHAPES:
            for count in cluster_counts(one, tile_clusters, mm(256, 256, 65536), SM90):
                assert count == 1 or count * tile_clusters <= one.blocks_per_sm * clusters_at_a_time(132, one.cluster)


def test_models_estimate_more_time_for_more_work() -> None:
    """Check that more sums, more bytes and oversized tiles cost time, and that shared copies save time."""

    def times(*cases: tuple[Problem, Any, dict[str, Any]]) -> list[float]:
        return [family_of(shape).estimate_us(problem, SM90, config(shape, **launched)) for problem, shape, launched in cases]

    four, shared = cluster_shape("64x64x64_s6_k4"), cluster_shape("64x64x64_s6_k2_2x2")
    alone = dataclasses.replace(shared, cluster_m=1, cluster_n=1)
    deep = cluster_shape("64x64x128_s6_k2_2x2")
    sixteen, small, large = skinny_shape(16, 128, 4, 2, 4), wgmma_shape(64, 2, 1, 128, 4), wgmma_shape(128, 2, 1, 128, 4)
    for ordered in (
        times(*((mm(64, 64, 65536), four, {"clusters_per_tile": n}) for n in (31, 16, 4, 1))),
        times(*((mm(256, 256, 16384), one, {"clusters_per_tile": 3}) for one in (shared, alone))),
        times(*((mm(128, 128, 65536), one, {"clusters_per_tile": 15}) for one in (deep, shared))),
        times(*((mm(128, 128, 16384), one, {"clusters_per_tile": 15}) for one in (shared, deep))),
        times(*((mixed(16, n, k), sixteen, {"cluster_k": 2}) for n, k in ((8192, 4096), (8192, 8192), (16384, 16384)))),
        times((mixed(16, 8192, 8192, **INT4), sixteen, {"cluster_k": 2}), (mixed(16, 8192, 8192), sixteen, {"cluster_k": 2})),
        times(*((mixed(m, n, 8192), large, {"cluster_k": 2}) for m, n in ((64, 8192), (64, 16384), (512, 16384)))),
        times(*((mixed(64, 8192, 8192), one, {"cluster_k": 2}) for one in (small, large))),
    ):
        assert ordered == sorted(set(ordered))
