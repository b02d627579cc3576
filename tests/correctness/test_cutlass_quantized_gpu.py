"""CUTLASS operations for int_mm, scaled_mm and mixed_mm on a GPU: verification of elements, scales and schedules."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from extras import needs
from rotation import rotated

from gemmtune.backends.cutlass import BACKEND
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.choice import Status
from gemmtune.device import detect
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings

pytestmark = needs("cutlass")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CUDA: dict[str, Any] = {"device_type": "cuda"}
MOST_VARIANTS = 6


def int_mm(m: int, n: int, k: int) -> Problem:
    return Problem.int_mm(m, n, k, **CUDA)


def int_mm_mul(m: int, n: int, k: int, dtype: torch.dtype) -> Problem:
    problem = int_mm(m, n, k)
    epilogue = trace(lambda acc, scale: acc * scale, F32, [torch.empty(n, dtype=dtype)])
    return dataclasses.replace(problem, epilogue=epilogue, out=dataclasses.replace(problem.out, dtype=dtype))


def scaled_mm(m: int, n: int, k: int, **fields: Any) -> Problem:
    return Problem.scaled_mm(m, n, k, **CUDA, **fields)


def with_bias(problem: Problem) -> Problem:
    epilogue = trace(lambda acc, bias: torch.relu(acc + bias), F32, [torch.empty(problem.n, dtype=BF16)])
    return dataclasses.replace(problem, epilogue=epilogue)


def column_major_result(problem: Problem) -> Problem:
    return dataclasses.replace(problem, out=dataclasses.replace(problem.out, stride=(1, problem.m)))


def mixed_mm(m: int, n: int, k: int, **fields: Any) -> Problem:
    return Problem.mixed_mm(m, n, k, **CUDA, **fields)


CASES: dict[str, tuple[Problem, str]] = {
    "int_mm": (int_mm(392, 528, 1168), "_128x128x128_1x1x1_.*pingpong"),
    "int_mm-stream-k": (int_mm(264, 528, 4112), "_128x128x128_1x2x1_.*stream_k"),
    "int_mm-few-rows": (int_mm(13, 528, 4112), "_64x8x512_1x1x1_.*pingpong"),
    "int_mm-2x": (int_mm(392, 528, 1168), "cutlass_tensorop_i16832gemm_s8_128x128_"),
    "int_mm_mul-bf16": (int_mm_mul(392, 528, 1168, BF16), "_128x192x128_1x2x1_.*pingpong"),
    "int_mm_mul-f32-2x": (int_mm_mul(392, 528, 1168, F32), "cutlass_tensorop_f32_i16832gemm_s8_128x128_"),
    "int_mm_mul-f16-2x": (int_mm_mul(392, 528, 1168, F16), "cutlass_tensorop_f16_i16832gemm_s8_64x64_"),
    "scaled_mm-tensor": (scaled_mm(392, 528, 1168, scales="tensor"), "_128x96x128_2x1x1_.*pingpong"),
    "scaled_mm-row-bias": (
        with_bias(scaled_mm(392, 528, 1168, scales="row", dtype_b=E5M2)), "_128x192x128_2x1x1_0_tnn_align16_warp",
    ),
    "scaled_mm-row-stream-k-f32": (scaled_mm(264, 528, 4112, scales="row", out_dtype=F32), "_128x128x128_1x2x1_.*stream_k"),
    "scaled_mm-few-rows": (scaled_mm(7, 528, 4112, scales="row", out_dtype=F16), "_64x8x128_1x1x1_.*pingpong"),
    "scaled_mm-fast": (scaled_mm(392, 528, 1168, scales="row", fast_accum=True), "_128x256x128_2x1x1_0_tnn_align16_warp"),
    "scaled_mm-fast-few-rows": (scaled_mm(16, 528, 4112, scales="tensor", fast_accum=True), "_64x16x512_1x1x1_"),
    "scaled_mm-column-major": (
        column_major_result(scaled_mm(392, 528, 1168, scales="row", dtype_b=E5M2)), "_128x64x128_1x2x1_.*pingpong",
    ),
    "mixed_mm-s8": (mixed_mm(392, 528, 1168, dtype=BF16, scales="column"), "_256x128x64_1x1x1_0_tnn_align16_warp"),
    "mixed_mm-u8-stream-k": (mixed_mm(264, 528, 4112, dtype_b=torch.uint8, scales="tensor"), "_128x128x64_1x2x1_.*stream_k"),
    "mixed_mm-s8-few-rows": (mixed_mm(13, 528, 4112, dtype=F16, scales="none"), "_64x16x128_2x1x1_.*pingpong"),
    "mixed_mm-u8-8-rows": (mixed_mm(8, 528, 4112, dtype=BF16, dtype_b=torch.uint8, scales="column"), "_64x8x256_1x1x1_.*pingpong"),
    "mixed_mm-e4m3": (mixed_mm(72, 528, 1168, dtype=BF16, dtype_b=E4M3, scales="column"), "_64x64x128_1x1x1_.*pingpong"),
    "mixed_mm-e5m2": (mixed_mm(392, 528, 1168, dtype=F16, dtype_b=E5M2, scales="tensor"), "_128x128x64_1x2x1_.*pingpong"),
}  # fmt: skip
"""Cases by name: a problem, and a part of an operation's name."""


def choice_of(name: str) -> CutlassChoice:
    problem, regex = CASES[name]
    settings = Settings(search="exhaustive", cutlass_op_allowlist_regex=regex)
    found = [choice for choice in BACKEND.enumerate(problem, detect("cuda"), settings).choices if isinstance(choice, CutlassChoice)]
    assert found
    return found[0]


needs_sm90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="operations of SM90 run on SM90 alone"
)


@pytest.mark.cutlass_build
@needs_sm90
@pytest.mark.parametrize("name", CASES)
def test_every_variant_passes_verification(name: str) -> None:
    choice = choice_of(name)
    verifier = Verifier(choice.problem, torch.device("cuda"))
    near = choice.launch_variants()
    for variant in (choice, *near[:: max(1, len(near) // MOST_VARIANTS)]):
        verdict = verifier.check(variant, variant.build())
        assert verdict.status is Status.OK, f"{variant.name}: {verdict.reason}"


SAMPLED = ("int_mm-stream-k", "scaled_mm-row-bias", "mixed_mm-s8-few-rows", "mixed_mm-u8-stream-k")
"""Operations that -m gpu compiles: two in one commit, the others in the next."""


@pytest.mark.gpu
@pytest.mark.slow
@needs_sm90
@pytest.mark.parametrize("name", rotated(SAMPLED, 2))
def test_result_passes_verification_and_is_repeatable(name: str) -> None:
    choice = choice_of(name)
    kernel = choice.build()
    verdict = Verifier(choice.problem, torch.device("cuda")).check(choice, kernel)
    assert verdict.status is Status.OK, f"{choice.name}: {verdict.reason}"
    run = kernel.run
    x = random_operands(choice.problem, torch.device("cuda"), seed=5)
    results = []
    for _ in range(20):
        x.out.fill_(77)
        run(x.out, x.tensors, ())
        results.append(x.out.clone())
    assert all(torch.equal(results[0], result) for result in results)
