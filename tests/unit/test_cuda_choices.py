"""What the cuda backend offers for which problem, and in which order."""

from __future__ import annotations

import dataclasses

import pytest

from gemmtune.backends.cuda import BACKEND
from gemmtune.backends.cuda.cluster.build import ClusterChoice
from gemmtune.backends.cuda.cluster.configs import SHAPES, Config, Shape
from gemmtune.backends.cuda.cluster.legality import check_config
from gemmtune.backends.cuda.cluster.rank import LIKELY, clusters_at_a_time, estimate_us, groups_of
from gemmtune.choice import Offers
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.settings import Settings

SM90 = preset("sm90")


def mm(m: int, n: int, k: int, layout: str = "nt") -> Problem:
    return Problem.mm(m, n, k, layout=layout, device_type="cuda")


def offers(problem: Problem, arch: str = "sm90", search: str = "default") -> Offers:
    return BACKEND.enumerate(problem, preset(arch), Settings(search=search))  # type: ignore[arg-type]


def choices(problem: Problem, search: str = "default") -> list[ClusterChoice]:
    return [choice for choice in offers(problem, search=search).choices if isinstance(choice, ClusterChoice)]


def shape(text: str) -> Shape:
    return next(shape for shape in SHAPES if str(shape) == text)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((128, 128, 65536), {"64x64x128_s6_k2_2x2_g15_pdl"}),
        ((64, 64, 65536), {"64x64x64_s6_k8_g15_pdl", "64x64x64_s6_k4_g30_pdl"}),
        ((96, 96, 32768), {"64x96x64_s10_k4_2x1_g15_pdl"}),
        ((128, 128, 16384), {"64x64x64_s6_k2_2x2_g15_pdl6"}),
        ((128, 128, 8192), {"64x64x64_s6_k2_2x2_g15_pdl6"}),
        ((200, 136, 8192), {"64x64x64_s6_k8_g1_pdl"}),
        ((100, 100, 100000), {"128x64x64_s8_k2_1x2_g30_pdl"}),
        ((256, 256, 16384), {"128x64x64_s8_k1_2x2_g15_pdl", "128x64x64_s8_k2_1x2_g7_pdl"}),
        ((64, 4096, 14336), {"64x64x64_s12_k2_g1_pdl"}),
        ((16, 4096, 14336), {"64x16x128_s5_k2_g2_swap_pdl"}),
        ((8, 1024, 4096), {"64x16x128_s5_k2_g4_swap_pdl"}),
        ((24, 2048, 8192), {"64x32x128_s4_k2_g2_swap_pdl"}),
        ((16, 6144, 4096), {"128x16x64_s6_k2_g1_swap_pdl"}),
        ((32, 6144, 4096), {"128x32x64_s5_k2_g1_swap_pdl"}),
    ],
)
def test_the_search_has_what_was_the_fastest_on_an_h200(sizes: tuple[int, int, int], wanted: set[str]) -> None:
    found = choices(mm(*sizes))
    told = {variant.name.removeprefix("cuda:cluster_") for choice in found for variant in (choice, *choice.launch_variants())}
    assert told >= wanted
    assert len(found) <= 5


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((128, 128, 2048), "K is 2048, tried from 4096 on"),
        ((384, 128, 65536), "a result of 384x128: tried with up to 256x256, or 64 rows or columns"),
        ((512, 512, 32768), "a result of 512x512: tried with up to 256x256, or 64 rows or columns"),
        ((64, 8192, 8192), "the result has 128 tiles of 64x64, tried with up to 66"),
        ((64, 6144, 4096), "the result has 96 tiles of 64x64, tried with up to 66"),
        ((16, 6144, 1024), "K is 1024, tried from 4096 on"),
        ((16, 28672, 8192), "the result has 448 tiles of 64x64, tried with up to 66"),
    ],
)
def test_what_is_not_likely_to_win_is_one_refusal(sizes: tuple[int, int, int], reason: str) -> None:
    found = offers(mm(*sizes))
    assert not found.choices
    [refusal] = [refusal for refusal in found.refusals if refusal.name.startswith("cuda:cluster")]
    assert (refusal.name, refusal.reason) == ("cuda:cluster", reason)


def test_an_exhaustive_search_has_every_legal_shape_either_way_round() -> None:
    found = choices(mm(256, 256, 2048), "exhaustive")
    assert {(choice.config.shape, choice.config.swapped) for choice in found} == {
        (one, way) for one in SHAPES for way in (False, True)
    }
    assert len({choice.name for choice in found}) == len(found)


def test_configs_that_are_not_legal_are_counted_by_their_reasons() -> None:
    found = offers(mm(136, 136, 8192, "tn"))
    assert found.choices
    reason = "an operand whose lines run across K is copied in lines of 64, and a tile has {} columns"
    assert {(r.name, r.count, r.reason) for r in found.refusals if r.name.startswith("cuda:cluster")} == {
        (f"cuda:cluster:{count} configs", count, reason.format(columns)) for columns, count in ((96, 2), (32, 4), (16, 4))
    }


@pytest.mark.parametrize("arch", ["sm80", "sm100", "gfx942", "avx2"])
def test_it_serves_sm90_alone(arch: str) -> None:
    device = preset(arch)
    assert not BACKEND.serves_by_default(device)
    assert BACKEND.serves_by_default(SM90)
    assert BACKEND.available(device).ok is (device.type == "cuda")
    assert not offers(Problem.mm(64, 64, 8192, device_type=device.type), arch).choices


def test_clusters_for_a_tile_fill_the_multiprocessors_and_leave_no_block_without_work() -> None:
    assert [clusters_at_a_time(shape(f"64x64x64_{text}"), SM90) for text in ("s12_k2", "s6_k4", "s6_k8")] == [66, 30, 15]
    assert [clusters_at_a_time(shape(text), SM90) for text in ("128x64x64_s8_k1_2x2", "64x64x64_s6_k2_2x2")] == [30, 15]
    eight = shape("64x64x64_s6_k8")
    assert groups_of(eight, 1, mm(128, 128, 65536), SM90) == (15,)
    assert groups_of(eight, 2, mm(128, 256, 65536), SM90) == (7, 8)
    assert groups_of(eight, 1, mm(128, 128, 8192), SM90) == (4,)
    assert groups_of(eight, 1, mm(128, 128, 512), SM90) == (1,)


def test_no_clusters_share_a_tile_that_have_no_room_beside_each_other() -> None:
    one_block, two_blocks = shape("64x64x128_s6_k2_2x2"), shape("64x64x64_s6_k2_2x2")
    problem = mm(256, 256, 65536)
    assert (one_block.resident, two_blocks.resident) == (1, 2)
    assert groups_of(one_block, 4, problem, SM90) == (3,)
    assert groups_of(two_blocks, 4, problem, SM90) == (3, 4)
    for spreads in range(1, 200):
        for one in SHAPES:
            for groups in groups_of(one, spreads, problem, SM90):
                assert groups == 1 or groups * spreads <= one.resident * clusters_at_a_time(one, SM90)


def test_variants_are_told_at_launch_and_need_no_compilation() -> None:
    [choice] = [choice for choice in choices(mm(256, 256, 16384)) if str(choice.config.shape) == "128x64x64_s8_k2_1x2"]
    near = choice.launch_variants()
    assert {variant.compile_key for variant in near} == {choice.compile_key}
    assert len({variant.content_hash for variant in (choice, *near)}) == len(near) + 1
    assert {str(variant.config).removeprefix(str(choice.config.shape)) for variant in near} == {"_g7", "_g7_pdl4"}
    assert all(check_config(variant.problem, SM90, variant.config) is None for variant in near)
    assert all(variant.claims.splits == variant.config.parts for variant in near)


def test_more_sums_to_exchange_take_the_model_longer() -> None:
    problem, four = mm(64, 64, 65536), shape("64x64x64_s6_k4")
    times = [estimate_us(problem, SM90, Config(shape=four, groups=groups)) for groups in (31, 16, 4, 1)]
    assert times == sorted(times)
    larger = dataclasses.replace(SM90, sm_count=4 * SM90.sm_count)
    assert estimate_us(problem, larger, Config(shape=four, groups=31)) > times[0]


def test_tiles_that_share_what_they_copy_take_the_model_less_time() -> None:
    problem, shared = mm(256, 256, 16384), shape("64x64x64_s6_k2_2x2")
    alone = dataclasses.replace(shared, spread_rows=1, spread_cols=1)
    assert estimate_us(problem, SM90, Config(shape=shared, groups=3)) < estimate_us(problem, SM90, Config(shape=alone, groups=3))


def test_larger_tiles_take_the_model_less_time_where_multiprocessors_get_most() -> None:
    problem = mm(256, 256, 16384)
    large, small = shape("128x64x64_s8_k2_1x2"), shape("64x64x64_s6_k2_2x2")
    assert estimate_us(problem, SM90, Config(shape=large, groups=7)) < estimate_us(problem, SM90, Config(shape=small, groups=3))
    assert [str(choice.config.shape) for choice in choices(problem, "quick")] == [str(large), "128x64x64_s8_k1_2x2"]


def test_a_cluster_that_does_not_divide_k_exchanges_nothing() -> None:
    [choice] = [choice for choice in choices(mm(256, 256, 16384)) if choice.config.shape.blocks == 1]
    assert (choice.config.shape.blocks, choice.config.shape.sent_bytes, choice.info["cluster"]) == (1, 0, 4)
    assert choice.config.shape.at_once == 2 * shape("64x64x64_s6_k2_2x2").at_once


def test_a_thread_reads_as_many_parts_as_its_registers_hold() -> None:
    alone = shape("128x64x64_s8_k1_2x2")
    beside = dataclasses.replace(alone, stages=4)
    assert [(one.resident, one.at_once) for one in (alone, beside)] == [(1, 16), (2, 8)]


def test_a_deeper_ring_pays_for_long_sums_alone() -> None:
    deep, shallow = shape("64x64x128_s6_k2_2x2"), shape("64x64x64_s6_k2_2x2")

    def times(k: int) -> list[float]:
        return [estimate_us(mm(128, 128, k), SM90, Config(shape=one, groups=15)) for one in (deep, shallow)]

    assert times(65536) == sorted(times(65536))
    assert times(16384) == sorted(times(16384), reverse=True)


def test_what_the_model_takes_much_longer_for_is_left_to_an_exhaustive_search() -> None:
    problem = mm(64, 4096, 14336)
    times = [estimate_us(problem, SM90, choice.config) for choice in choices(problem)]
    assert max(times) <= LIKELY * min(times)
    left = [estimate_us(problem, SM90, choice.config) for choice in choices(problem, "exhaustive")]
    assert max(left) > LIKELY * min(times)


def test_few_parts_have_lines_of_their_own_and_many_take_turns() -> None:
    assert not Config(shape=shape("64x64x64_s12_k2"), groups=4).dealt
    assert Config(shape=shape("64x64x64_s12_k2"), groups=5).dealt
