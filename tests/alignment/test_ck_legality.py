"""Offered instances of Composable Kernel: CK's rules, layouts, alignment, LDS, registers, and paths through the pipelines."""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.architectures import matrix_choices
from gemmtune.backends.ck import BACKEND
from gemmtune.backends.ck.configs import Config, Transfer, path_of, prefetched, transfer, vector_along, why_too_short
from gemmtune.backends.ck.instances import INSTANCES, WAVE, Instance
from gemmtune.backends.ck.legality import OPS, Predicate, check_problem, why_illegal
from gemmtune.backends.ck.products import MFMA_K, Element, product_of
from gemmtune.choice import Offers
from gemmtune.device import preset
from gemmtune.errors import UnavailableError
from gemmtune.filters import filtered
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings, patch

ARCHS = ("gfx90a", "gfx942")
LDS_BYTES = 64 * 1024


def configs(problem: Problem, arch: str = "gfx942") -> dict[Instance, Config | str]:
    predicate = Predicate(problem, preset(arch))
    return {instance: predicate.config(instance) for instance in INSTANCES}


def legal(problem: Problem, arch: str = "gfx942") -> list[Config]:
    return [config for config in configs(problem, arch).values() if isinstance(config, Config)]


def mm(m: int, n: int, k: int, **options: object) -> Problem:
    return Problem.mm(m, n, k, device_type="cuda", **options)


def test_instances_are_distinct_and_whole() -> None:
    assert len(set(INSTANCES)) == len(INSTANCES)
    for instance in INSTANCES:
        rows, cols = instance.repeats
        assert instance.threads == WAVE * math.prod(instance.waves) <= 1024
        assert (rows * instance.mfma * instance.waves[0], cols * instance.mfma * instance.waves[1]) == (
            instance.block_m, instance.block_n,
        )  # fmt: skip


ITEM_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f8": 1, "bf8": 1}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E4M3FNUZ, E5M2FNUZ = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz


@pytest.mark.parametrize(("arch", "element"), [(arch, element) for arch in ARCHS for element in MFMA_K[arch]])
def test_every_instance_multiplies_whole_packs(arch: str, element: Element) -> None:
    itemsize = ITEM_BYTES[element]
    for instance in INSTANCES:
        assert why_illegal(instance, arch, element, itemsize) is None, instance
    shallow = dataclasses.replace(INSTANCES[0], bytes_k=16)
    assert "not a multiple of a wave's step" in str(why_illegal(shallow, arch, element, itemsize))
    odd = dataclasses.replace(INSTANCES[0], block_m=96)
    assert "not a multiple of 2x2 waves" in str(why_illegal(odd, arch, element, itemsize))


def covers(copy: Transfer, threads: int) -> bool:
    """Check that the threads' shares are equal, consist of whole loads and whole LDS lines, and cover the block."""
    along = copy.k1 if copy.along_k else copy.block // copy.threads_mn
    return (
        copy.threads_k * copy.threads_mn <= threads
        and copy.depth % copy.k1 == 0
        and copy.depth // copy.k1 % copy.threads_k == 0
        and copy.block % copy.threads_mn == 0
        and along % copy.vector == 0
    )


@given(st.sampled_from(INSTANCES), st.sampled_from((1, 2, 4)), st.booleans(), st.sampled_from((1, 2, 4, 8, 16)), st.booleans())
def test_threads_divide_what_they_copy(instance: Instance, itemsize: int, along_k: bool, widest: int, first: bool) -> None:
    widest = min(widest, 16 // itemsize)
    block = instance.block_m if first else instance.block_n
    copy = transfer(block, instance.block_k(itemsize), instance.threads, itemsize, along_k=along_k, widest=widest)
    assert isinstance(copy, Transfer), copy
    assert covers(copy, instance.threads)
    assert copy.vector <= widest


def test_rejects_blocks_that_threads_cannot_divide() -> None:
    assert transfer(48, 24, 64, 2, along_k=True, widest=8) == "64 threads cannot divide a part of 48 by 24 elements evenly"


@given(st.sampled_from(INSTANCES), st.integers(1, 300))
def test_a_path_equals_the_path_of_its_smallest_number_of_steps(instance: Instance, steps: int) -> None:
    if why_too_short(instance, steps):
        assert steps <= prefetched(instance)
        return
    path = path_of(instance, steps)
    assert path.steps <= max(steps, 2)
    assert path_of(instance, path.steps) == path
    assert why_too_short(instance, path.steps) is None
    assert path.loop == (steps > prefetched(instance))


def test_prefetched_steps_match_ck() -> None:
    """The values come from CK's formula: 32 KiB per compute unit, divided by its blocks and the bytes of a step."""
    by_tile = {(i.block_m, i.block_n): prefetched(i) for i in INSTANCES if i.version == "v2"}
    assert (by_tile[16, 16], by_tile[32, 16], by_tile[64, 16], by_tile[256, 32]) == (2, 3, 2, 2)
    assert {i.version: prefetched(i) for i in INSTANCES if i.version != "v2"} == {"v1": 1, "v3": 2, "v4": 3, "v5": 3}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_layout_has_legal_instances_that_fit_the_device(arch: str, layout: str, dtype: torch.dtype) -> None:
    for sizes in ((4096, 4096, 4096), (16, 4096, 4096), (500, 504, 1001), (1, 1, 7)):
        found = legal(mm(*sizes, dtype=dtype, layout=layout), arch)
        assert found, sizes
        for config in found:
            assert config.lds_bytes <= LDS_BYTES
            along_k = (layout[0] == "n", layout[1] == "t")
            assert min(sizes) == 1 or (config.a.along_k, config.b.along_k) == along_k  # a single row is a column too
            assert config.store.threads_m * config.store.threads_n == config.instance.threads


def test_names_identify_compilations() -> None:
    for problem in (mm(4096, 4096, 4096), mm(500, 504, 1001, layout="tn"), mm(16, 512, 512, dtype=torch.float32)):
        predicate = Predicate(problem, preset("gfx942"))
        by_label = {config.label: config for config in legal(problem)}
        assert len(by_label) == len(legal(problem)) > 5
        assert predicate.refused is None
    assert "kk_256x256x32_x32_w2x2_v4_intrawave_a8b8c8_default_even" in {c.label for c in legal(mm(4096, 4096, 4096))}


def test_loads_are_as_wide_as_sizes_strides_and_offsets_allow() -> None:
    base = mm(512, 512, 512).a
    assert vector_along(base, -1) == 8
    assert vector_along(dataclasses.replace(base, offset=4), -1) == 4
    assert vector_along(dataclasses.replace(base, stride=(514, 1)), -1) == 2
    assert vector_along(Layout.contiguous((512, 1001), torch.float16), -1) == 1
    assert vector_along(Layout.contiguous((1, 1004), torch.float16), -1) == 4
    narrow = mm(512, 512, 512)
    narrow = dataclasses.replace(narrow, a=dataclasses.replace(narrow.a, offset=1))
    assert {config.a.vector for config in legal(narrow)} == {1}
    assert {config.b.vector for config in legal(narrow)} == {8}


def test_sizes_with_a_remainder_are_padded() -> None:
    kinds = {
        (512, 512, 512): "Default", (500, 512, 512): "MN", (512, 504, 512): "MN", (512, 512, 1000): "K", (500, 512, 1000): "MNK"
    }  # fmt: skip
    for sizes, padding in kinds.items():
        assert {c.padding for c in legal(mm(*sizes)) if (c.instance.block_m, c.instance.block_n) == (128, 128)} == {padding}


def test_a_column_major_result_swaps_the_operands() -> None:
    problem = mm(384, 640, 768)
    turned = dataclasses.replace(problem, out=dataclasses.replace(problem.out, stride=(1, problem.m)))
    assert all(config.swap_ab and config.label.endswith("_swap") for config in legal(turned))
    assert not any(config.swap_ab for config in legal(problem))


REASONS = [
    (mm(64, 64, 64), "sm90", "works on AMD GPUs of gfx90a and gfx942, not on sm90"),
    (Problem.mm(64, 64, 64), "avx512", "works on AMD GPUs of gfx90a and gfx942, not on avx512"),
    (mm(64, 64, 64, dtype=torch.float64), "gfx942", "a and b are float64 and float64, expected two equal dtypes of float16,"),
    (mm(0, 64, 64), "gfx942", "the product is empty"),
    (Problem.int_mm(64, 64, 64, device_type="cuda"), "gfx942", "int_mm is not an operation of this backend"),
    (Problem.scaled_mm(64, 64, 64, device_type="cuda"), "gfx90a", "gfx90a has no matrix instruction for float8_e4m3fn"),
    (
        Problem.scaled_mm(256, 256, 256, scales="block_1x128", device_type="cuda"), "gfx942",
        "scale_a is for 1x128 elements, expected one per whole row or one for all, which scales sums",
    ),
    (
        Problem.scaled_mm(256, 256, 128, dtype=E4M3FNUZ, scales="block_128x128", device_type="cuda"), "gfx942",
        "scale_b is for 128x128 elements, expected one per whole column or one for all, which scales sums",
    ),
    (
        Problem.scaled_mm(64, 64, 64, dtype=E4M3FNUZ, dtype_b=E5M2FNUZ, device_type="cuda"), "gfx942",
        "a and b are float8_e4m3fnuz and float8_e5m2fnuz, expected two equal dtypes",
    ),
    (
        Problem.scaled_mm(64, 64, 64, dtype=E5M2, device_type="cuda"), "gfx90a",
        "gfx90a has no matrix instruction for float8_e5m2",
    ),
    (Problem.bmm(70000, 8, 8, 8, device_type="cuda"), "gfx942", "batch 70000: a grid has at most 65535 products"),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "arch", "reason"), REASONS, ids=[reason[:30] for *_, reason in REASONS])
def test_unserved_problems_are_refused_with_a_reason(problem: Problem, arch: str, reason: str) -> None:
    assert reason in str(check_problem(problem, preset(arch)))
    (refusal,) = BACKEND.enumerate(problem, preset(arch), Settings()).refusals
    assert reason in refusal.reason


def test_8_bit_floats_are_multiplied_as_gfx942_has_them_or_as_float16() -> None:
    def made(a: torch.dtype, b: torch.dtype) -> tuple[object, ...]:
        product = product_of(a, b, "gfx942")
        assert not isinstance(product, str)
        return product.element, *product.changes, product.factor

    assert made(E4M3FNUZ, E4M3FNUZ) == ("f8", "none", "none", 1)
    assert made(E5M2FNUZ, E5M2FNUZ) == ("bf8", "none", "none", 1)
    assert made(E4M3, E4M3) == ("f8", "halved", "halved", 4)
    assert made(E5M2, E5M2) == ("f16", "widened", "widened", 1)
    assert made(E4M3, E5M2) == ("f16", "shrunk", "widened", 256)
    mixed = Problem.scaled_mm(512, 512, 1024, dtype=E4M3, dtype_b=E5M2, device_type="cuda")
    for config in legal(mixed):
        assert (config.itemsize, config.changed) == (2, True)
        assert config.a.vector <= config.a.k1 == 8  # 8 bytes of memory are 16 of LDS
    native = Problem.scaled_mm(512, 512, 1024, dtype=E4M3FNUZ, device_type="cuda")
    rewritten = Problem.scaled_mm(512, 512, 1024, device_type="cuda")
    assert {c.instance for c in legal(rewritten)} < {c.instance for c in legal(native)}  # they need registers


def test_k_is_split_where_tiles_leave_compute_units_idle() -> None:
    few, many = mm(16, 512, 4096), mm(4096, 4096, 4096)
    device = preset("gfx942")
    assert {splits for _, splits in Predicate(many, device).candidates()} == {1}
    predicate = Predicate(few, device)
    splits = {(instance, splits) for instance, splits in predicate.candidates()}
    assert len(splits) > len(INSTANCES)
    for instance, parts in splits:
        config = predicate.config(instance, parts)
        if isinstance(config, str) or parts == 1:
            continue
        tiles = -(-16 // instance.block_m) * -(-512 // instance.block_n)
        assert tiles * parts <= device.sm_count
        assert 4096 % (parts * instance.block_k(2)) == 0
        assert config.label.endswith(f"_k{parts}")
        assert config.path == path_of(instance, 4096 // instance.block_k(2) // parts)
    small = next(i for i in INSTANCES if (i.block_m, i.block_n) == (16, 64))
    assert predicate.config(small, 3) == "3 splits: 64 steps along K are not a multiple"
    wide = Predicate(mm(16384, 16384, 4096), device).config(INSTANCES[0], 2)
    assert "expected at most 268435456" in str(wide)
    offers = BACKEND.enumerate(few, device, Settings())
    assert any(choice.claims.splits > 1 and choice.info["split_k"] == choice.claims.splits for choice in offers.choices)


def test_rejects_unreadable_operands() -> None:
    problem = mm(64, 64, 64)
    strided = dataclasses.replace(problem, a=dataclasses.replace(problem.a, stride=(200, 2)))
    assert Predicate(strided, preset("gfx942")).refused == "a has neither contiguous rows nor contiguous columns"
    spread = dataclasses.replace(problem, out=dataclasses.replace(problem.out, stride=(200, 2)))
    assert Predicate(spread, preset("gfx942")).refused == "out has neither contiguous rows nor contiguous columns"
    large = mm(40000, 64, 40000)
    assert "expected fewer than 2^31" in str(Predicate(large, preset("gfx942")).refused)
    x = torch.empty_strided((64, 64), (200, 3), dtype=torch.bfloat16, device="meta")
    fused = dataclasses.replace(problem, epilogue=trace(lambda acc, x: acc + x, problem.accumulator, (x,)))
    assert "operand 0 after a and b" in str(Predicate(fused, preset("gfx942")).refused)


def test_refusals_of_instances_have_numbers() -> None:
    reasons = {reason for reason in configs(mm(48, 4096, 128)).values() if isinstance(reason, str)}
    assert "block_m 256: half of it or more hangs over m = 48" in reasons
    assert "pipeline v4 prefetches 3 steps: needs at least 4 along K" in reasons
    deep = dataclasses.replace(INSTANCES[1], bytes_k=128)
    assert Predicate(mm(4096, 4096, 4096), preset("gfx942")).config(deep) == "LDS: needs 131072 bytes, a block of gfx942 has 65536"
    crowded = dataclasses.replace(INSTANCES[0], scheduler="interwave", version="v1")
    refused = Predicate(mm(4096, 4096, 4096), preset("gfx942")).config(crowded)
    assert "registers: needs about" in str(refused)
    assert "256 available with 2 waves" in str(refused)


def test_tiles_that_clang_19_spills_are_refused() -> None:
    """The compiler's scratch was 2176 bytes if 8-bit floats are converted, 172 if every number is loaded separately."""
    narrow = Problem.scaled_mm(4096, 4096, 4096, scales="row", device_type="cuda")
    for problem, label in (
        (narrow, "256x256x64_x32_w2x2_v3_intrawave"),
        (mm(4001, 4003, 4001, layout="nn"), "256x256x32_x32_w2x2_v5_intrawave"),
    ):
        [found] = [x for i, x in configs(problem).items() if i.label(problem.dtype.itemsize) == label]
        assert "512 available with 1 waves" in str(found)
    assert any(config.instance.block_m * config.instance.block_n >= 128 * 128 for config in legal(narrow))


def test_operands_other_than_a_and_b_are_rows_columns_or_one_number() -> None:
    product = Problem.scaled_mm(256, 512, 1024, scales="row", device_type="cuda")
    config = legal(product)[0]
    reads = Predicate(product, preset("gfx942")).reads(config)
    assert [(r.kind, r.stride, r.vector) for r in reads] == [("col", 0, 1), ("row", 0, 4)]
    whole = Problem.scaled_mm(256, 512, 1024, scales="tensor", device_type="cuda")
    assert [r.kind for r in Predicate(whole, preset("gfx942")).reads(legal(whole)[0])] == ["one", "one"]


def test_the_search_offers_the_likeliest_and_counts_the_rest() -> None:
    problem = mm(512, 512, 512)
    offers = BACKEND.enumerate(problem, preset("gfx942"), Settings())
    assert len(offers.choices) == 4
    assert len({choice.info["tile"] for choice in offers.choices}) == 4
    candidates = list(Predicate(problem, preset("gfx942")).candidates())
    every = BACKEND.enumerate(problem, preset("gfx942"), Settings(search="exhaustive")).choices
    assert {c.name for c in offers.choices} < {c.name for c in every}
    assert sum(refusal.count for refusal in offers.refusals) + len(every) == len(candidates) > len(INSTANCES)
    assert len(legal(problem)) < len(every) == len({c.compile_key for c in every})
    assert pickle.loads(pickle.dumps(every[0])).content_hash == every[0].content_hash


def test_large_products_have_large_tiles_first_and_few_rows_small_ones() -> None:
    def tiles(m: int) -> list[str]:
        return [choice.info["tile"] for choice in BACKEND.enumerate(mm(m, 4096, 4096), preset("gfx942"), Settings()).choices]

    assert "256x256x32" in tiles(4096)
    assert not any(tile.startswith(("16x", "32x")) for tile in tiles(4096))
    assert all(tile.startswith(("16x", "32x")) for tile in tiles(16))


def test_cap_threshold_and_names_filter() -> None:
    problem, device = mm(512, 512, 512), preset("gfx942")

    def kept(**changes: object) -> Offers:
        chosen = Settings(**changes)  # type: ignore[arg-type]
        return filtered(BACKEND.enumerate(problem, device, chosen), chosen, templates=("ck",))

    assert len(kept(max_profiling_configs=2).choices) == 2
    [refusal] = {refusal.reason for refusal in kept(template_min_gemm_size=512**3 + 1).refusals if "is below" in refusal.reason}
    assert refusal == f"M·N·K = {512**3} is below template_min_gemm_size = {512**3 + 1}"
    assert all("_v4_" in choice.name for choice in kept(choice_allowlist_regex="_v4_").choices)
    assert not any("intrawave" in choice.name for choice in kept(choice_denylist_regex="intrawave").choices)
    assert kept(choice_allowlist_regex="nothing like that").choices == ()


def test_sizes_share_a_compilation_where_their_paths_do() -> None:
    def key(m: int, n: int, k: int) -> str:
        settings = Settings(choice_allowlist_regex="_128x128x64_x32_w2x2_v4_.*(even|odd)$")
        return BACKEND.enumerate(mm(m, n, k), preset("gfx942"), settings).choices[0].compile_key

    assert key(512, 512, 512) == key(1024, 2048, 4096)
    assert key(512, 512, 512) != key(512, 512, 512 + 64)  # an odd number of steps
    assert key(512, 512, 512) != key(500, 512, 512)


@pytest.mark.turn(4, 8)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_architecture_matrix_has_every_operation_and_compilation_once(arch: str) -> None:
    choices = matrix_choices(arch, "quick", settings=Settings(backends=("ck",)))
    served = set(OPS) if arch == "gfx942" else set(OPS) - {"scaled_mm"}
    assert {choice.problem.op for choice in choices} == served
    assert {choice.arch for choice in choices} == {arch}
    assert len({choice.compile_key for choice in choices}) == len(choices) > 100


def test_rejects_kernels_that_cannot_be_compiled(tmp_path: Path) -> None:
    with patch(cache_dir=str(tmp_path), ck_dir=str(tmp_path)) as settings:
        choice = BACKEND.enumerate(mm(512, 512, 512), preset("gfx942"), settings).choices[0]
        assert not choice.compiled
        assert choice.obstacle is not None
        assert "no compiler for HIP" in choice.obstacle or "expected a checkout of Composable Kernel" in choice.obstacle
        with pytest.raises(UnavailableError):
            choice.compile()


def test_serves_only_if_named_and_says_that_it_never_ran() -> None:
    assert not BACKEND.serves_by_default(preset("gfx942"))
    for arch in ("gfx942", "sm90", "avx2"):
        availability = BACKEND.available(preset(arch))
        assert availability.ok == (arch == "gfx942")
        assert "compiled and inspected, and never run" in availability.detail
    for choice in BACKEND.enumerate(mm(512, 512, 512), preset("gfx942"), Settings()).choices:
        assert choice.info["run"] == "never: compiled and inspected alone"
        assert choice.claims.flush_subnormals is False
    on_older = BACKEND.enumerate(mm(512, 512, 512), preset("gfx90a"), Settings()).choices
    assert all(choice.claims.flush_subnormals for choice in on_older)
