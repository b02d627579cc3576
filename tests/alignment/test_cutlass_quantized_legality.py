"""Legality of CUTLASS operations for int_mm, scaled_mm and mixed_mm: offers, claims and refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gemmtune.backends.cutlass import BACKEND
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.backends.cutlass.operation import ELEMENTS
from gemmtune.choice import Offers
from gemmtune.device import preset
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings
from gemmtune.toolchain.orientation import letter, orient

pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CUDA: dict[str, Any] = {"device_type": "cuda"}
SHAPE = (512, 768, 1024)


def int_mm(*shape: int, **fields: Any) -> Problem:
    return Problem.int_mm(*(shape or SHAPE), **CUDA, **fields)


def int_mm_mul(dtype: torch.dtype, *shape: int) -> Problem:
    problem = int_mm(*shape)
    epilogue = trace(lambda acc, scale: acc * scale, F32, [torch.empty(problem.n, dtype=dtype)])
    return dataclasses.replace(problem, epilogue=epilogue, out=dataclasses.replace(problem.out, dtype=dtype))


def scaled_mm(*shape: int, **fields: Any) -> Problem:
    return Problem.scaled_mm(*(shape or SHAPE), **CUDA, **fields)


def transposed_out(problem: Problem) -> Problem:
    return dataclasses.replace(problem, out=dataclasses.replace(problem.out, stride=(1, problem.m)))


def mixed_mm(*shape: int, **fields: Any) -> Problem:
    return Problem.mixed_mm(*(shape or SHAPE), **CUDA, **fields)


SERVED: dict[str, Problem] = {
    "int_mm": int_mm(),
    "int_mm_mul-f32": int_mm_mul(F32),
    "int_mm_mul-bf16": int_mm_mul(BF16),
    "scaled_mm-tensor": scaled_mm(scales="tensor"),
    "scaled_mm-row-fast": scaled_mm(scales="row", fast_accum=True),
    "scaled_mm-e5m2-e4m3-f32": scaled_mm(dtype=E5M2, dtype_b=E4M3, out_dtype=F32, scales="row"),
    "mixed_mm-s8": mixed_mm(dtype=BF16, dtype_b=torch.int8, scales="column"),
    "mixed_mm-u8": mixed_mm(dtype=F16, dtype_b=torch.uint8, scales="none"),
    "mixed_mm-e4m3": mixed_mm(dtype=BF16, dtype_b=E4M3, scales="tensor"),
    "mixed_mm-e5m2": mixed_mm(dtype=F16, dtype_b=E5M2, scales="column"),
    "mixed_mm-s8-packed": mixed_mm(dtype=BF16, prepacked=True, scales="column"),
}


def offers(problem: Problem, arch: str = "sm90", **changes: Any) -> Offers:
    return BACKEND.enumerate(problem, preset(arch), Settings(**changes))


def choices(problem: Problem, arch: str = "sm90", **changes: Any) -> list[CutlassChoice]:
    found = [choice for choice in offers(problem, arch, **changes).choices if isinstance(choice, CutlassChoice)]
    assert found
    return found


@pytest.mark.parametrize("name", SERVED)
def test_operation_elements_match_problem(name: str) -> None:
    problem = SERVED[name]
    for choice in choices(problem, search="exhaustive"):
        how, op = orient(problem, swap_ab=choice.swap_ab), choice.config.operation
        assert [ELEMENTS[x] for x in (op.a, op.b, op.d, op.accumulator)] == [
            how.a.dtype, how.b.dtype, problem.out.dtype, problem.accumulator,
        ]  # fmt: skip
        assert (op.layout_a, op.layout_b, op.layout_d) == (letter(how.a), letter(how.b), letter(how.out))
        assert op.alignment_a <= how.a.alignment
        assert op.alignment_b <= how.b.alignment
        assert op.alignment_d * problem.out.dtype.itemsize <= 16


@pytest.mark.parametrize("name", SERVED)
def test_names_are_unique_and_contain_elements(name: str) -> None:
    found = choices(SERVED[name], search="exhaustive")
    assert len({choice.name for choice in found}) == len({choice.content_hash for choice in found}) == len(found)
    for choice in found:
        op = choice.config.operation
        if op.modern:
            assert f"_gemm_{op.a}_{op.b}_{op.accumulator}_" in choice.name


@pytest.mark.parametrize("arch", ["sm75", "sm80"])
@pytest.mark.parametrize("problem", [int_mm(), int_mm_mul(F32), int_mm_mul(F16)], ids=str)
def test_older_gpus_get_2x_operations_for_int8(problem: Problem, arch: str) -> None:
    found = choices(problem, arch, search="exhaustive")
    assert not any(choice.config.operation.modern for choice in found)
    assert {choice.config.operation.d for choice in found} == {
        {v: k for k, v in ELEMENTS.items() if k != "tf32"}[problem.out.dtype]
    }


def test_saturating_sums_are_offered_only_for_short_k() -> None:
    assert choices(int_mm(64, 64, 131056), "sm80")
    found = offers(int_mm(64, 64, 131072), "sm80")
    assert not found.choices
    assert {refusal.reason for refusal in found.refusals} >= {
        "its sums saturate at the limits of int32, which more than 131071 products can reach"
    }
    assert all(c.config.operation.math == "multiply_add" for c in choices(int_mm(64, 64, 131072), search="exhaustive"))


def test_int8_sums_are_exact_and_reach_epilogue_as_float32() -> None:
    for choice in choices(int_mm_mul(BF16)):
        assert (choice.claims.accumulate, choice.claims.partials) == (torch.int32, torch.int32)
        assert choice.claims.epilogue_input == F32
        assert choice.source.compute == "float"
    for choice in choices(int_mm()):
        assert choice.claims.epilogue_input == torch.int32
        assert choice.source.compute == "int32_t"


@pytest.mark.parametrize("fast_accum", [False, True])
def test_only_fast_accum_keeps_sums_in_tensor_cores(*, fast_accum: bool) -> None:
    for choice in choices(scaled_mm(fast_accum=fast_accum), search="exhaustive"):
        op = choice.config.operation
        assert op.kernel_schedule.endswith("FP8FastAccum") == fast_accum
        assert ("fp8_fastaccum" in choice.name) == fast_accum
        assert op.promotes == (not fast_accum)
        assert choice.claims.accumulator_bits is None


def test_sums_are_promoted_every_128_elements() -> None:
    """Check tile depths: CUTLASS promotes after four instructions of 32 elements, and a deeper tile would need more."""
    for scales in ("tensor", "row"):
        assert {choice.config.operation.tile[2] for choice in choices(scaled_mm(scales=scales), search="exhaustive")} == {128}
    assert {choice.config.operation.tile[2] for choice in choices(scaled_mm(fast_accum=True), search="exhaustive")} > {128}


def test_promoted_sums_double_registers() -> None:
    precise, fast = (
        {c.config.operation.tile[:2] for c in choices(scaled_mm(fast_accum=f), search="exhaustive")} for f in (False, True)
    )
    assert (128, 256) in fast - precise


@pytest.mark.parametrize("name", [name for name in SERVED if name.startswith("mixed")])
def test_narrower_operand_is_first_and_exact(name: str) -> None:
    for choice in choices(SERVED[name], search="exhaustive"):
        op = choice.config.operation
        assert choice.swap_ab
        assert ELEMENTS[op.a].itemsize == 1
        assert ELEMENTS[op.b].itemsize == 2
        assert op.multiplied == op.b
        assert choice.claims.weights is None
        assert choice.packed_format is None


SUMS_SCALED = [name for name in SERVED if name != "int_mm"]


@pytest.mark.parametrize("name", SUMS_SCALED)
def test_scales_precede_epilogue_operands(name: str) -> None:
    problem = SERVED[name]
    expected = [layout.dtype for layout in (*problem.scales, *(problem.epilogue.operands if problem.epilogue else ()))]
    for choice in choices(problem):
        assert list(choice.source.operands) == expected
        assert choice.source.scales == len(problem.scales)
        assert len(orient(problem, swap_ab=choice.swap_ab).added) == len(expected)


@pytest.mark.parametrize("problem", [int_mm(), scaled_mm(dtype=E4M3, dtype_b=E5M2)], ids=str)
def test_column_major_result_needs_no_swap(problem: Problem) -> None:
    assert not any(choice.swap_ab for choice in choices(transposed_out(problem), search="exhaustive"))


REFUSED: dict[str, tuple[Problem, str, str]] = {
    "block-scales-of-a-alone": (
        dataclasses.replace(scaled_mm(scales="block_1x128"), scale_b=Layout.contiguous((1, 768), F32)), "sm90",
        "scale_a is for 1x128 elements, expected one per whole row or one for all, which scales sums"),
    "block-scales": (
        scaled_mm(scales="block_128x128"), "sm90",
        "scale_a is for 1x128 elements, expected one per whole row or one for all, which scales sums"),
    "scales-of-groups": (
        mixed_mm(scales="group_64"), "sm90",
        "scale_b is for 64x1 elements, expected one per whole column or one for all, which scales sums"),
    "zero-points": (mixed_mm(dtype_b=torch.uint8, scales="column", zeros=True), "sm90",
                    "b has zero points, expected none: a scale multiplies sums"),
    "four-bits": (mixed_mm(encoding="uint4", scales="column"), "sm90",
                  "b has uint4 numbers, two in a byte, expected 8 bits for each"),
    "float32": (mixed_mm(dtype=F32, scales="column"), "sm90", "a is float32, expected float16 or bfloat16 with a narrower b"),
    "older": (scaled_mm(), "sm80", "scaled_mm is served only on sm90, not on sm80"),
    "newer": (mixed_mm(), "sm100", "mixed_mm is served only on sm90, not on sm100"),
    "row-major-b": (scaled_mm(layout="nn"), "sm90", "a is n, expected t"),
    "odd-k": (int_mm(64, 64, 1001), "sm90", "a is aligned to 1 elements, expected 16"),
    "column-major-result": (transposed_out(mixed_mm(scales="column")), "sm90", "out is t, expected n"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_reason(name: str) -> None:
    problem, arch, reason = REFUSED[name]
    found = offers(problem, arch)
    assert not found.choices
    assert reason in {refusal.reason for refusal in found.refusals}


def test_single_block_along_k_is_row_or_column_scale() -> None:
    short = scaled_mm(512, 768, 128, scales="block_1x128")
    assert short.scale_a == Layout.contiguous((512, 1), F32)
    assert choices(short)
