"""Triton's kernels of grouped products: verified in the interpreter with their own claims, and compiled for GPUs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from gemmtune.backends.triton.grouped.choice import RowsChoice, TermsChoice
from gemmtune.backends.triton.grouped.configs import GroupedConfig, most_tiles, why_not_config
from gemmtune.backends.triton.grouped.offers import ranked
from gemmtune.backends.triton.grouped.words import WordRowsChoice, words_configs
from gemmtune.backends.triton.mixed.words import WordsConfig
from gemmtune.choice import Status
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.problem.grouped_compositions import spans

pytest.importorskip("triton", reason="the interpreter is Triton's")

import triton_jobs
from interpreter import Run
from rotation import rotated

pytestmark = pytest.mark.rotates(8)

SMALL = GroupedConfig(block_m=16, block_n=16, block_k=16, stages=1, warps=1)
WORDS = WordsConfig(block_m=16, block_n=16, block_k=64, stages=1, warps=1)
SWAPPED = replace(SMALL, block_m=32, block_k=32, described=True, swap=True)
HALF = {"dtype": torch.float16, "device_type": "cpu"}

VERIFIED = {
    "fp16": (Problem.grouped_mm(37, 24, 40, groups=5, **HALF), SMALL),
    "bf16-descriptors-swapped": (Problem.grouped_mm(21, 24, 32, groups=17, layout="nn", device_type="cpu"), SWAPPED),
    "fp16-descriptors-k-tail": (Problem.grouped_mm(20, 16, 40, groups=3, **HALF), replace(SWAPPED, swap=False)),
    "fp32-one-group-strided": (
        Problem.grouped_mm(9, 20, 33, groups=1, layout="tn", dtype=torch.float32, device_type="cpu"),
        replace(SMALL, swap=True),
    ),
    "int8-descriptors-swapped": (Problem.mixed_grouped_mm(20, 24, 64, groups=3, device_type="cpu"), SWAPPED),
    "int4-groups-of-32": (
        Problem.mixed_grouped_mm(20, 24, 64, groups=3, encoding="int4", scales="group_32", **HALF),
        replace(SMALL, block_k=32, swap=True),
    ),
    "words-int4-groups-of-64": (
        Problem.mixed_grouped_mm(37, 24, 192, groups=5, encoding="int4", scales="group_64", **HALF),
        replace(WORDS, swap=False),
    ),
    "words-int8-one-row-each": (Problem.mixed_grouped_mm(6, 40, 128, groups=9, device_type="cpu"), WORDS),
    "words-uint4": (Problem.mixed_grouped_mm(50, 17, 64, groups=2, encoding="uint4", **HALF), WORDS),
    "fp8-rows-swapped": (Problem.scaled_grouped_mm(20, 24, 64, groups=3, device_type="cpu"), SWAPPED),
    "fp8-blocks": (
        Problem.scaled_grouped_mm(20, 136, 160, groups=3, scales="block_128x128", layout="nn", device_type="cpu"),
        replace(SMALL, block_k=32),
    ),
    "fp8-blocks-swapped": (
        Problem.scaled_grouped_mm(20, 24, 160, groups=3, scales="block_1x128", out_dtype=torch.float32, device_type="cpu"),
        SWAPPED,
    ),
    "picked-rows": (Problem.routed_grouped_mm(37, 24, 40, groups=5, tokens=19, **HALF), SMALL),
    "picked-rows-gated-swapped": (
        Problem.routed_grouped_mm(21, 24, 64, groups=3, tokens=7, gated="silu", device_type="cpu"),
        SWAPPED,
    ),
    "gated-row-major-weights": (
        Problem.routed_grouped_mm(20, 20, 32, groups=3, gated="gelu", layout="nn", dtype=torch.float32, device_type="cpu"),
        SMALL,
    ),
    "gated-descriptors": (
        Problem.routed_grouped_mm(20, 24, 32, groups=3, gated="gelu_tanh", layout="nn", **HALF),
        replace(SWAPPED, swap=False),
    ),
    "added-up": (Problem.combined_grouped_mm(36, 24, 40, groups=5, tokens=12, **HALF), SMALL),
    "added-up-swapped": (Problem.combined_grouped_mm(36, 24, 64, groups=5, tokens=18, device_type="cpu"), SWAPPED),
    "terms-fp16": (Problem.grouped_k_mm(24, 20, 40, groups=4, **HALF), SMALL),
    "terms-fp32-one-group": (
        Problem.grouped_k_mm(17, 20, 24, groups=1, layout="nt", dtype=torch.float32, device_type="cpu"),
        SMALL,
    ),
}


@pytest.mark.turn(2, 8)
@pytest.mark.parametrize("name", rotated(list(VERIFIED), 6, "grouped"))
def test_verification_accepts_the_kernels_with_their_own_claims(interpreted: Run, name: str) -> None:
    problem, config = VERIFIED[name]
    [verdict] = interpreted(triton_jobs.verdicts, problem, [config], family=triton_jobs.grouped)
    assert verdict.status is Status.OK, verdict.reason


def test_invalid_offsets_touch_no_other_memory(interpreted: Run) -> None:
    for ends in ([9, 3, 40, 12], [-7, 5, 2, 99]):
        for make in (Problem.grouped_mm, Problem.grouped_k_mm):
            assert interpreted(triton_jobs.guarded, make(12, 16, 12, groups=4, **HALF), SMALL, ends)


def test_the_grid_has_at_most_one_program_per_tile() -> None:
    problem = Problem.grouped_mm(100, 48, 32, groups=7, device_type="cpu")
    for ends in ([100] * 7, [14, 28, 42, 56, 70, 84, 100], [1, 2, 3, 4, 5, 6, 100], [17, 34, 51, 68, 85, 99, 100]):
        tiles = sum(-(-(end - begin) // 16) for begin, end in spans(ends, 100)) * 3
        assert tiles <= most_tiles(problem, SMALL)
    assert most_tiles(Problem.grouped_mm(3, 16, 16, groups=9, device_type="cpu"), SMALL) == 3


def test_tiles_are_counted_in_32_bits() -> None:
    config = replace(SMALL, block_k=32)
    reasons = {
        side: why_not_config(Problem.grouped_mm(side, side, 64, groups=1, device_type="cuda"), preset("sm90"), config)
        for side in (2**19 - 64, 2**19)
    }
    assert reasons == {2**19 - 64: None, 2**19: "more tiles than 32 bits can count"}


@pytest.mark.turn(7, 8)
@pytest.mark.parametrize("arch", rotated(["sm80", "sm90"], 2, "grouped"))
def test_every_config_fits_and_the_best_compile(arch: str) -> None:
    device = preset(arch)
    for m, groups in ((16, 128), (8192, 8)):
        problem = Problem.grouped_mm(m, 768, 2048, groups=groups, device_type="cuda")
        configs = ranked(problem, device)
        assert {why_not_config(problem, device, config) for config in configs} == {None}
        [artifact] = RowsChoice.of(problem, device, configs[0]).artifacts(device)
        assert artifact.shared_bytes <= device.smem_per_block_bytes
        assert artifact.spilled_share == 0
        assert configs[0].described == (arch == "sm90")
        assert configs[0].swap == (arch == "sm90" and m == 16)
    problem = Problem.grouped_k_mm(768, 2048, 8192, device_type="cuda")
    [artifact] = TermsChoice.of(problem, device, ranked(problem, device)[0]).artifacts(device)
    assert artifact.spilled_share == 0


@pytest.mark.parametrize("arch", rotated(["sm80", "sm90"], 2, "grouped-words"))
def test_narrow_integers_are_read_as_words(arch: str) -> None:
    device = preset(arch)
    for encoding, scales in (("int4", "group_128"), ("", "column")):
        problem = Problem.mixed_grouped_mm(16, 768, 2048, encoding=encoding, scales=scales, device_type="cuda")
        [artifact] = WordRowsChoice.of(problem, device, words_configs(problem, device)[0]).artifacts(device)
        assert artifact.spilled_share == 0
        assert artifact.shared_bytes <= artifact.predicted_bytes
        assert re.search("mma.sync", artifact.code)
    for other in (
        Problem.mixed_grouped_mm(16, 768, 2048, encoding="int4", scales="group_32", device_type="cuda"),
        Problem.mixed_grouped_mm(16, 768, 2048, layout="nn", device_type="cuda"),
        Problem.mixed_grouped_mm(16, 768, 2056, encoding="int4", device_type="cuda"),
        Problem.mixed_grouped_mm(8192, 768, 2048, groups=8, device_type="cuda"),
    ):
        assert words_configs(other, device) == ()


def test_few_rows_use_the_instruction_of_a_warp_group_and_the_copy_engine() -> None:
    problem, device = Problem.grouped_mm(16, 768, 2048, groups=128, device_type="cuda"), preset("sm90")
    [kernel] = RowsChoice.of(problem, device, ranked(problem, device)[0]).kernels
    ptx = kernel.compile().asm["ptx"]
    assert re.search("wgmma.mma_async", ptx)
    assert re.search(r"cp.async.bulk.tensor", ptx)


def test_rejects_layouts_that_descriptors_do_not_serve() -> None:
    device, described = preset("sm90"), replace(SMALL, block_k=64, described=True, warps=4, stages=3)
    refused = {
        "does not divide K = 2880": Problem.grouped_mm(64, 64, 2880 - 32, groups=4, layout="nn", device_type="cuda"),
        "groups dense": Problem.grouped_mm(64, 63, 65, groups=4, device_type="cuda"),
        "only 8-bit and 16-bit operands": Problem.grouped_mm(64, 64, 64, groups=4, dtype=torch.float32, device_type="cuda"),
        "serve only groups of rows": Problem.grouped_k_mm(64, 64, 64, groups=4, device_type="cuda"),
        "a group starts at any row": Problem.grouped_mm(64, 64, 64, groups=4, layout="tn", device_type="cuda"),
        "the second half of b's columns": Problem.routed_grouped_mm(
            64, 68, 64, groups=4, tokens=64, gated="silu", layout="nn", device_type="cuda"
        ),
    }
    for reason, problem in refused.items():
        assert reason.split(" = ")[0] in (why_not_config(problem, device, described) or "")
    assert why_not_config(Problem.grouped_mm(64, 64, 2880 - 32, groups=4, device_type="cuda"), device, described) is None


def test_a_choice_serves_every_m_for_which_its_config_is_legal() -> None:
    device = preset("sm90")
    problem = Problem.grouped_mm(64, 512, 512, groups=4, device_type="cuda")
    choice = RowsChoice.of(problem, device, ranked(problem, device)[0])
    other = choice.at(replace(problem, a=replace(problem.a, size=(96, 512)), out=replace(problem.out, size=(96, 512))), device)
    assert isinstance(other, RowsChoice)
    assert (other.problem.m, other.compile_key) == (96, choice.compile_key)
    small = Problem.grouped_mm(64, 512, 504, groups=4, layout="nn", device_type="cuda")
    assert "does not divide K = 504" in str(choice.at(small, device))
