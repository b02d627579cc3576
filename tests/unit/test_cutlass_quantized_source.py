"""Sources of CUTLASS kernels for quantized products: element types, and scales before the epilogue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_kernels import needs_compiler
from test_cutlass_source import pointwise, source_of, with_epilogue

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
        (Problem.mixed_mm(512, 512, 512, dtype=torch.bfloat16, dtype_b=torch.uint8, scales="column", **CUDA),
         ["using ElementA = uint8_t;", "using ElementB = cutlass::bfloat16_t;", "acc = acc * x0[i];"], ["x1["]),
        (Problem.mixed_mm(512, 512, 512, dtype=torch.float16, scales="none", **CUDA),
         ["using ElementA = int8_t;", "LinearCombination<ElementD, float, void, float>"], ["Pointwise"]),
    ],
    ids=["int_mm", "scaled_mm", "fast_accum", "mixed_mm", "mixed_mm-unscaled"],
)  # fmt: skip
def test_elements_and_scales(problem: Problem, expected: list[str], absent: list[str]) -> None:
    text = source_of(problem).text
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


def test_digest_distinguishes_scale_from_operand() -> None:
    scaled = Problem.mixed_mm(512, 512, 512, dtype=torch.float16, scales="column", scale_dtype=torch.float32, **CUDA)
    bare = Problem.mixed_mm(512, 512, 512, dtype=torch.float16, scales="none", **CUDA)
    added = with_epilogue(bare, lambda acc, x: acc + x, torch.empty(512))
    assert len({source_of(problem).digest for problem in (scaled, bare, added)}) == 3


@pytest.mark.turn(3, 8)
@needs_compiler
def test_scales_multiply_sum_before_epilogue(tmp_path: Path) -> None:
    problem = Problem.scaled_mm(512, 512, 512, scales="row", **CUDA)
    problem = with_epilogue(problem, lambda acc: torch.relu(acc + 0.25))
    generator = torch.Generator().manual_seed(1)
    acc, scale_a, scale_b = (torch.randn(400, generator=generator) for _ in range(3))
    got = pointwise(problem, tmp_path)(acc, scale_a, scale_b)
    assert torch.equal(got, torch.relu(acc * scale_a * scale_b + 0.25))
