"""Sources of CUTLASS kernels for quantized products: element types, and scales before the epilogue."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_kernels import needs_compiler
from test_cutlass_source import choice_of, pointwise, source_of, with_epilogue

from gemmtune.problem import Problem

CUDA: dict[str, Any] = {"device_type": "cuda"}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("problem", "expected", "absent"),
    [
        (Problem.int_mm(512, 512, 512, **CUDA),
         ["using ElementD = int32_t;", "LinearCombination<ElementD, int32_t, void, int32_t>"], ["Pointwise", "float"]),
        (Problem.scaled_mm(512, 512, 512, dtype_b=E5M2, scales="row", **CUDA),
         ["using ElementA = cutlass::float_e5m2_t;", "using ElementB = cutlass::float_e4m3_t;",
          "acc = acc * x0[i];", "acc = acc * x1[i];", "Operand<float>, Operand<float>>;"], ["FP8FastAccum"]),
        (Problem.scaled_mm(512, 512, 512, fast_accum=True, **CUDA), ["FP8FastAccum"], []),
        (Problem.scaled_mm(512, 512, 512, scales="block_128x128", **CUDA),
         ["    128, 1, 128, cute::GMMA::Major::MN, cute::GMMA::Major::K>;", "LinearCombination<", "FP8Blockwise>::CollectiveOp",
          "ptr_SFA = static_cast<float const*>(launch.x[1]);"], ["Pointwise", "Operand<"]),
        (Problem.mixed_mm(512, 512, 512, dtype=torch.bfloat16, dtype_b=torch.uint8, scales="column", **CUDA),
         ["using ElementA = uint8_t;", "using ElementB = cutlass::bfloat16_t;", "acc = acc * x0[i];"], ["x1["]),
        (Problem.mixed_mm(512, 512, 512, dtype=torch.float16, scales="none", **CUDA),
         ["using ElementA = int8_t;", "LinearCombination<ElementD, float, void, float>"], ["Pointwise"]),
    ],
    ids=["int_mm", "scaled_mm", "fast_accum", "blocks", "mixed_mm", "mixed_mm-unscaled"],
)  # fmt: skip
def test_elements_and_scales(problem: Problem, expected: list[str], absent: list[str]) -> None:
    text = source_of(problem).text
    assert "{{" not in text
    for piece in expected:
        assert piece in text
    for piece in absent:
        assert piece not in text


def packed(**fields: Any) -> Problem:
    return dataclasses.replace(Problem.mixed_mm(16, 512, 512, **CUDA, **fields), prepacked=True)


@pytest.mark.parametrize(
    ("problem", "regex", "expected", "absent"),
    [
        (Problem.mixed_mm(64, 512, 512, dtype=torch.bfloat16, encoding="int4", scales="group_128", **CUDA), "pingpong",
         ["using ElementA = cutlass::int4b_t;", "using Scale = cutlass::bfloat16_t;", "= cute::tuple<ElementA, Scale>;",
          "ptr_S = static_cast<Scale const*>(launch.x[0]);", "LinearCombination<"], ["Pointwise", "ptr_Z", "gemmtune::"]),
        (packed(dtype=torch.float16, encoding="uint4", scales="group_64", zeros=True), "pingpong",
         ["using ElementA = cutlass::uint4b_t;", "tuple<ElementA, Scale, Scale>", "Shuffled<Collective, true, true>",
          "ptr_Z = static_cast<Scale const*>(launch.x[1]);"], ["class Sliced", "Pointwise"]),
        (packed(dtype=torch.float16, scales="column"), "slicedk3",
         ["gemmtune::Shuffled<Collective, false, false>", "gemmtune::Sliced<Mainloop, Epilogue, 3>", "acc = acc * x0[i];"],
         ["ptr_S", "arguments.scheduler", "GemmUniversalAdapter<"]),
    ],
    ids=["int4-groups", "packed-zeros", "packed-sliced"],
)  # fmt: skip
def test_scaled_and_packed_weights(problem: Problem, regex: str, expected: list[str], absent: list[str]) -> None:
    pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")
    regex += ".*shuffled" if problem.prepacked else ""
    text = choice_of(problem, cutlass_op_allowlist_regex=regex).source.text
    assert "{{" not in text
    for piece in expected:
        assert piece in text
    for piece in absent:
        assert piece not in text


def test_epilogue_operands_follow_scales() -> None:
    problem = Problem.scaled_mm(512, 512, 512, scales="row", **CUDA)
    text = source_of(with_epilogue(problem, lambda acc, x: acc + x, torch.empty(512, dtype=torch.bfloat16))).text
    assert "Operand<float>, Operand<float>, Operand<cutlass::bfloat16_t>>;" in text
    assert "acc + x2[i]" in text


def test_block_scales_are_no_epilogue_operands() -> None:
    problem = Problem.scaled_mm(512, 512, 512, scales="block_1x128", **CUDA)
    text = source_of(with_epilogue(problem, lambda acc, x: acc + x, torch.empty(512, dtype=torch.bfloat16))).text
    assert "Sm90AccFetch, Operand<cutlass::bfloat16_t>>;" in text
    assert "acc + x2[i]" in text
    assert "static_cast<cutlass::bfloat16_t const*>(launch.x[2])" in text
    assert "acc = acc * x" not in text


def test_digest_distinguishes_scale_from_operand() -> None:
    scaled = Problem.mixed_mm(512, 512, 512, dtype=torch.float16, scales="column", scale_dtype=torch.float32, **CUDA)
    bare = Problem.mixed_mm(512, 512, 512, dtype=torch.float16, scales="none", **CUDA)
    added = with_epilogue(bare, lambda acc, x: acc + x, torch.empty(512))
    assert len({source_of(problem).digest for problem in (scaled, bare, added)}) == 3


@needs_compiler
def test_scales_multiply_sum_before_epilogue(tmp_path: Path) -> None:
    problem = Problem.scaled_mm(512, 512, 512, scales="row", **CUDA)
    problem = with_epilogue(problem, lambda acc: torch.relu(acc + 0.25))
    generator = torch.Generator().manual_seed(1)
    acc, scale_a, scale_b = (torch.randn(400, generator=generator) for _ in range(3))
    got = pointwise(problem, tmp_path)(acc, scale_a, scale_b)
    assert torch.equal(got, torch.relu(acc * scale_a * scale_b + 0.25))
