"""The mutants' Triton kernel without a GPU: the effect of each fault in Triton's interpreter, and compilation for SM90."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="these mutants are Triton kernels")

import triton
import triton_mutant_jobs
from interpreter import Run
from mutants import triton_kernels
from mutants.table import MUTANTS
from mutants.triton_kernels import BLOCKS, TritonGemm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_mutant_jobs import M, N

NAMES = [name for name in triton_kernels.__all__ if isinstance(getattr(triton_kernels, name), TritonGemm)]
RIGHT_ON_A_CPU = ("right", "split_in_2", "race", "wrong_stream", "offsets_of_32_bits")
POINTERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}


@pytest.fixture(scope="module")
def spoiled(interpreted: Run) -> dict[str, dict[str, int]]:
    """Return the errors of each kernel in Triton's interpreter."""
    return interpreted(triton_mutant_jobs.spoiled)


def test_every_kernel_but_the_right_ones_is_in_the_table() -> None:
    listed = {mutant.name.partition(":")[2] for mutant in MUTANTS if mutant.name.startswith("triton_kernels:")}
    assert listed == set(NAMES) - {"right", "split_in_2"}


@pytest.mark.parametrize("name", RIGHT_ON_A_CPU)
def test_a_kernel_whose_fault_needs_a_gpu_is_right(name: str, spoiled: dict[str, dict[str, int]]) -> None:
    assert spoiled[name] == {"wrong": 0, "beside": 0, "outside": False}


@pytest.mark.parametrize(
    ("name", "wrong", "beside", "outside"),
    [
        ("rows_written_past_the_end", 0, (-M % BLOCKS["BLOCK_M"]) * N, True),
        ("element_unwritten", 1, 0, False),
        ("last_row_clamped", N, 0, False),
        ("k_tail_dropped", M * N, 0, False),
        ("k_tail_unmasked", M * N, 0, True),
    ],
)
def test_a_fault_spoils_the_expected_number_of_elements(
    name: str, wrong: int, beside: int, outside: bool, spoiled: dict[str, dict[str, int]]
) -> None:
    assert spoiled[name] == {"wrong": wrong, "beside": beside, "outside": outside}


def compiled(gemm: TritonGemm, dtype: str) -> Any:
    stored = str(gemm.partials).removeprefix("torch.") if gemm.splits > 1 else dtype
    constants = {"FAULT": gemm.fault, **BLOCKS}
    types = dict.fromkeys(triton_kernels.product.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    types |= {"a": POINTERS[dtype], "b": POINTERS[dtype], "out": POINTERS[stored]}
    source = ASTSource(fn=triton_kernels.product, signature=types, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize("name", NAMES)
def test_compiles_for_sm90(name: str) -> None:
    gemm = getattr(triton_kernels, name)
    code = compiled(gemm, "float16").asm["ptx"]
    accumulator = "f16" if gemm.fault == "float16_accumulation" else "f32"
    assert f".{accumulator}.f16.f16" in code
    assert "wgmma.mma_async" in code


@pytest.mark.parametrize(("name", "bits"), [("right", "i64"), ("offsets_of_32_bits", "i32")])
def test_offsets_have_64_bits_except_in_the_mutant(name: str, bits: str) -> None:
    code = compiled(getattr(triton_kernels, name), "float16").asm["ttir"]
    products = re.findall(r"arith\.muli .* : tensor<\d+x\d+x(i\d+)>", code)
    assert set(products) == {bits}
