"""Offers of the Triton backend for quantized operations, and their kernels, compiled without a GPU."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from rotation import rotated

from gemmtune.architectures import inspect_choices
from gemmtune.backends.triton import BACKEND
from gemmtune.backends.triton.build import TritonChoice
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.legality import Predicate
from gemmtune.backends.triton.mixed.offers import words_choices, words_configs
from gemmtune.backends.triton.mixed.words import WordsChoice, WordsConfig, why_not_config, why_not_words
from gemmtune.backends.triton.vec import why_not_words_vector, words_vector_choices
from gemmtune.device import preset
from gemmtune.effort import EFFORT
from gemmtune.filters import by_mixed_mm_choice
from gemmtune.problem import Layout, Problem
from gemmtune.problem.operations import QUANTIZED_OPS
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings
from gemmtune.toolchain.compiled import CompiledChoice

pytestmark = pytest.mark.rotates(9)

CUDA: dict[str, Any] = {"device_type": "cuda"}
E4M3 = torch.float8_e4m3fn
TILE = Config(block_m=64, block_n=64, block_k=64, stages=3, warps=4)
PROBLEMS: dict[str, Problem] = {
    "int": Problem.int_mm(512, 512, 512, **CUDA),
    "int-odd": Problem.int_mm(100, 99, 101, layout="nn", **CUDA),
    "int-row": Problem.int_mm(1, 512, 512, layout="tn", **CUDA),
    "scaled": Problem.scaled_mm(512, 512, 512, **CUDA),
    "scaled-blocks": Problem.scaled_mm(500, 512, 512, dtype=torch.float8_e5m2, dtype_b=E4M3, scales="block_128x128", **CUDA),
    "int8": Problem.mixed_mm(16, 4096, 4096, scales="column", **CUDA),
    "int8-nn": Problem.mixed_mm(64, 512, 512, layout="nn", scales="column", **CUDA),
    "int4": Problem.mixed_mm(256, 4096, 4096, encoding="int4", scales="group_128", **CUDA),
    "uint4-zeros": Problem.mixed_mm(16, 4096, 4096, dtype=torch.bfloat16, encoding="uint4", scales="group_64", zeros=True, **CUDA),
    "e4m3-odd": Problem.mixed_mm(100, 99, 102, dtype_b=E4M3, scales="group_32", **CUDA),
    "float32": Problem.mixed_mm(512, 512, 512, dtype=torch.float32, dtype_b=torch.uint8, scales="group_64", zeros=True, **CUDA),
}  # fmt: skip


ARCHS = ("sm80", "sm90")
"""Architectures for which each commit compiles a third of the problems."""
MOST_OF_LONG_SUMS = 4
"""Families of choices that divide the sum differently from the mm template."""


def _choices(problem: Problem, arch: str, search: Any = "default") -> list[CompiledChoice]:
    offers = BACKEND.enumerate(problem, preset(arch), Settings(search=search))
    return [choice for choice in offers.choices if isinstance(choice, CompiledChoice)]


@pytest.mark.parametrize("name", PROBLEMS)
def test_choices_of_a_search_are_few_with_distinct_names_and_hashes(name: str) -> None:
    choices = [choice for choice in _choices(PROBLEMS[name], "sm90") if choice.claims.deterministic]
    assert 0 < len(choices) <= (EFFORT["default"].configs["triton:mm"] or 0) + MOST_OF_LONG_SUMS
    assert len({choice.name for choice in choices}) == len(choices)
    assert len({choice.content_hash for choice in choices}) == len(choices)


@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm89", "sm90", "sm100", "sm120", "gfx942"])
@pytest.mark.parametrize("op", QUANTIZED_OPS)
def test_every_architecture_is_served_or_refused_with_a_reason(op: str, arch: str) -> None:
    device = preset(arch)
    problem: Problem = getattr(Problem, op)(64, 512, 512, device_type="cuda")
    offers = BACKEND.enumerate(problem, device, Settings(search="quick"))
    assert bool(offers.choices) != bool(offers.refusals)
    assert bool(offers.choices) == (op != "mixed_mm" or arch != "sm75")


def test_rejects_noncontiguous_weights_except_for_float32() -> None:
    strided = Layout(size=(512, 512), stride=(2, 1024), dtype=torch.int8)
    half = replace(Problem.mixed_mm(64, 512, 512, **CUDA), b=strided)
    full = replace(Problem.mixed_mm(64, 512, 512, dtype=torch.float32, **CUDA), b=strided)
    (refusal,) = BACKEND.enumerate(half, preset("sm90"), Settings()).refusals
    assert "neither its rows nor its columns are contiguous" in refusal.reason
    assert BACKEND.enumerate(full, preset("sm90"), Settings()).choices


@pytest.mark.parametrize(
    ("problem", "config", "words"),
    [
        (Problem.mixed_mm(64, 512, 512, scales="group_32", **CUDA), TILE, "does not divide the 32 elements"),
        (Problem.scaled_mm(64, 512, 512, scales="block_1x128", **CUDA), replace(TILE, block_k=256), "does not divide the 128"),
        (Problem.scaled_mm(64, 512, 512, **CUDA), replace(TILE, block_k=256), "at most 128 terms"),
        (Problem.int_mm(64, 512, 512, **CUDA), replace(TILE, block_k=16), "8-bit products need at least 32"),
    ],
    ids=["group", "block", "narrow", "bytes"],
)
def test_rejects_illegal_config(problem: Problem, config: Config, words: str) -> None:
    assert words in (Predicate(problem, preset("sm90")).check(config) or "")


def test_8_bit_float_sums_are_promoted_without_fast_accum() -> None:
    texts = {
        fast: TritonChoice.of(Problem.scaled_mm(512, 512, 512, fast_accum=fast, **CUDA), preset("sm90"), TILE).source.text
        for fast in (False, True)
    }
    assert "max_num_imprecise_acc=64" in texts[False]
    assert "max_num_imprecise_acc" not in texts[True]
    older = TritonChoice.of(Problem.scaled_mm(512, 512, 512, **CUDA), preset("sm89"), TILE).source.text
    assert "acc = acc + part" in older


def test_claims_state_rounding_of_weights() -> None:
    device, words = preset("sm90"), WordsConfig(block_m=16, block_n=64, block_k=128, stages=3, warps=2)
    grouped = Problem.mixed_mm(16, 512, 512, encoding="int4", scales="group_128", **CUDA)
    from_zero = Problem.mixed_mm(16, 512, 512, encoding="int4", scales="group_128", zeros=True, **CUDA)
    column = Problem.mixed_mm(16, 512, 512, scales="column", **CUDA)
    assert TritonChoice.of(column, device, TILE).claims.weights is None
    assert TritonChoice.of(grouped, device, TILE).claims.weights is torch.float16
    assert WordsChoice.of(grouped, device, words).claims.weights is None
    assert WordsChoice.of(from_zero, device, words).claims.weights is torch.float16


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (Problem.mixed_mm(16, 512, 512, dtype=torch.float32, **CUDA), "expected 16-bit floats and int8"),
        (Problem.mixed_mm(16, 512, 512, dtype_b=torch.float8_e5m2, **CUDA), "expected 16-bit floats and int8"),
        (Problem.mixed_mm(16, 512, 512, layout="nn", **CUDA), "columns must be contiguous"),
        (Problem.mixed_mm(16, 512, 500, **CUDA), "multiples of 16 bytes"),
        (Problem.int_mm(16, 512, 512, **CUDA), "has no weights"),
    ],
    ids=["float32", "e5m2", "rows", "odd", "op"],
)
def test_rejects_weights_that_words_do_not_serve(problem: Problem, words: str) -> None:
    assert words in (why_not_words(problem, preset("sm90")) or "")
    assert not words_choices(problem, preset("sm90"), None)


def test_warp_groups_are_for_sm90_and_need_weights_as_rows() -> None:
    problem, config = PROBLEMS["int4"], WordsConfig(block_m=64, block_n=128, block_k=128, stages=3, warps=4, fragments=True)
    assert why_not_config(problem, preset("sm90"), config) is None
    assert "single warps would multiply" in (why_not_config(problem, preset("sm80"), config) or "")
    assert "a warp group would multiply" in (why_not_config(problem, preset("sm90"), replace(config, fragments=False)) or "")
    assert not any(c.fragments for c in words_configs(problem, preset("sm80")))


def _large(m: int, **options: Any) -> Problem:
    return Problem.mixed_mm(m, 8192, 8192, **{"scales": "column", **options}, **CUDA)


INT4: dict[str, Any] = {"encoding": "int4", "scales": "group_128"}


@pytest.mark.parametrize(
    ("problem", "fastest"),
    [
        (_large(1), "16x128x128_s6_w4_k2_pdl"),
        (_large(16), "16x64x128_s3_w2_k4_pdl"),
        (_large(16, **INT4), "16x64x128_s3_w2_k4_swap_pdl"),
        (_large(64), "64x64x128_s3_w4_k3_group_pdl"),
        (_large(64, **INT4), "64x128x128_s4_w4_k4_group_pdl"),
        (_large(256), "64x128x128_s4_w4_group_pdl"),
        (_large(4096), "128x128x64_s4_w8_group_pdl"),
        (_large(4096, **INT4), "64x128x128_s3_w4_group_pdl"),
        (_large(16, dtype=torch.bfloat16), "16x128x256_s4_w4_k2_pdl"),
    ],
    ids=str,
)
def test_a_quick_search_contains_the_measured_fastest_config(problem: Problem, fastest: str) -> None:
    assert f"triton:mixed_words_{fastest}" in [choice.name for choice in _choices(problem, "sm90", "quick")]


@pytest.mark.parametrize(
    ("problem", "count"),
    [
        (_large(1), 1),
        (_large(32), 1),
        (_large(64, **INT4), 1),
        (_large(16, layout="nn"), 1),
        (_large(65), 0),
        (_large(16, dtype=torch.bfloat16), 0),
        (Problem.mixed_mm(16, 4096, 2048, **CUDA), 0),
        (Problem.mixed_mm(1, 4104, 4096, **CUDA), 0),
        (Problem.int_mm(16, 4096, 4096, **CUDA), 0),
    ],
    ids=str,
)
def test_one_choice_is_recommended_for_known_shapes(problem: Problem, count: int) -> None:
    offers = BACKEND.enumerate(problem, preset("sm90"), Settings(search="quick"))
    assert [choice.info.get("heuristic", False) for choice in offers.choices[:2]] == [bool(count), False]
    assert sum("heuristic" in choice.info for choice in offers.choices) == count
    if count:
        assert by_mixed_mm_choice(offers, Settings(mixed_mm_choice="heuristic")).choices == offers.choices[:1]


def test_one_and_two_rows_of_bytes_need_no_tensor_cores() -> None:
    device = preset("sm90")
    for m in (1, 2):
        choices = words_vector_choices(_large(m), device, 4)
        assert len(choices) == 4
        assert all(choice.config.block_m == m for choice in choices)
        assert {choice.name for choice in choices} <= {choice.name for choice in _choices(_large(m), "sm90")}
    assert "at most 2 rows" in (why_not_words_vector(_large(3), device) or "")
    assert "only 8-bit weights" in (why_not_words_vector(_large(1, **INT4), device) or "")
    assert "each weight" in (why_not_words_vector(_large(1, scales="group_64"), device) or "")
    assert "each weight" in (why_not_words_vector(_large(1, dtype_b=torch.uint8, zeros=True), device) or "")


@pytest.mark.turn(6, 8)
@pytest.mark.parametrize(
    ("dtype", "arch"), rotated([*itertools.product((torch.float16, torch.bfloat16), ARCHS)], 3, "vector"), ids=str
)
def test_kernels_without_tensor_cores_compile_within_predicted_resources(dtype: torch.dtype, arch: str) -> None:
    pytest.importorskip("triton", reason="compiles with Triton")
    choices = [choice for m in (1, 2) for choice in words_vector_choices(_large(m, dtype=dtype), preset(arch), 2)]
    wrong = [f"{inspection}: {text}" for inspection in inspect_choices(choices) for text in inspection.problems]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("scales", "config"),
    [
        ("tensor", Config(block_m=128, block_n=256, block_k=128, stages=4, warps=8)),
        ("block_128x128", Config(block_m=256, block_n=128, block_k=128, stages=3, warps=8)),
        ("block_128x128", Config(block_m=128, block_n=128, block_k=128, stages=3, warps=4)),
    ],
)
def test_step_sums_need_additional_registers(scales: Any, config: Config) -> None:
    problem = Problem.scaled_mm(4096, 4096, 7168, scales=scales, **CUDA)
    assert "registers" in (Predicate(problem, preset("sm90")).check(config) or "")
    assert Predicate(problem, preset("sm90")).check(replace(config, block_m=128, block_n=128, warps=8)) is None


def test_a_prepacked_operand_is_read_unchanged() -> None:
    problem = Problem.mm(512, 512, 512, dtype=torch.float16, prepacked=True, **CUDA)
    choices = _choices(problem, "sm90")
    assert choices
    assert all(choice.packed_format is None for choice in choices)


@pytest.mark.parametrize(("name", "arch"), rotated([*itertools.product(PROBLEMS, ARCHS)], 9, "quantized"))
def test_kernels_compile_within_predicted_resources_to_the_expected_instructions(name: str, arch: str) -> None:
    pytest.importorskip("triton", reason="compiles with Triton")
    choices = _choices(PROBLEMS[name], arch)
    inspections = list(inspect_choices([choices[0], choices[-1]]))
    wrong = [f"{inspection}: {text}" for inspection in inspections for text in inspection.problems]
    assert not wrong, "\n".join(wrong)


@pytest.mark.turn(7, 8)
def test_warp_group_multiplications_end_before_their_registers_are_overwritten() -> None:
    pytest.importorskip("triton", reason="compiles with Triton")
    choice = next(
        c
        for c in words_choices(Problem.mixed_mm(256, 4096, 4096, scales="column", **CUDA), preset("sm90"), None)
        if "group" in c.name
    )
    inner = getattr(choice, "inner", None)
    assert isinstance(inner, WordsChoice)
    ptx = inner.kernels[0].compile().asm["ptx"]
    # A wait for all multiplications follows the last one of a step, before the branch back.
    rest = ptx[ptx.rindex("wgmma.mma_async") :]
    assert re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", rest[: rest.index("bra")]) == ["0"]


def test_a_split_sum_of_integers_becomes_float32_for_its_epilogue() -> None:
    """The conversion is in a branch of the kernel, where no value may change its type."""
    product = Problem.int_mm(512, 512, 1024, **CUDA)
    scaled = trace(lambda acc, x: acc * x, product.epilogue_dtype, (torch.empty(512, device="meta"),))
    problem = replace(product, out=Layout.contiguous(product.out.size, torch.bfloat16), epilogue=scaled)
    config = Config(block_m=64, block_n=64, block_k=64, stages=3, warps=4, split_k=2)
    [inspection] = inspect_choices([TritonChoice.of(problem, preset("sm80"), config)])
    assert inspection.problems == ()


def test_problems_of_one_class_share_a_kernel() -> None:
    problems = (Problem.int_mm(m, n, 1024, **CUDA) for m, n in ((512, 512), (640, 1024)))
    keys = {TritonChoice.of(problem, preset("sm90"), TILE).compile_key for problem in problems}
    assert len(keys) == 1
    assert isinstance(TritonChoice.of(PROBLEMS["int"], preset("sm90"), TILE), TritonChoice)


def test_the_interpreter_has_a_tile_for_small_products_of_bytes() -> None:
    offers = BACKEND.enumerate(Problem.int_mm(16, 32, 64, device_type="cpu"), preset("portable"), Settings())
    assert [choice.name for choice in offers.choices] == ["triton:int_mm_16x16x32_s1_w1"]
