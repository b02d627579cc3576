"""Values of the Triton templates for int_mm, scaled_mm and mixed_mm, computed by Triton's interpreter on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.mixed.words import WordsConfig
from gemmtune.choice import Status
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace

pytest.importorskip("triton", reason="the interpreter is Triton's")

import triton_quantized_jobs as jobs
from interpreter import Run
from quantized_cases import mixed_operands
from rotation import rotated

pytestmark = pytest.mark.rotates(9)

PLAIN = Config(block_m=16, block_n=32, block_k=32, stages=1, warps=1)
SPLIT = replace(PLAIN, split_k=2)
WORDS = WordsConfig(block_m=16, block_n=32, block_k=64, stages=1, warps=1)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CPU: dict[str, Any] = {"device_type": "cpu"}


def assert_right(run: Run, problem: Problem, *configs: Config) -> None:
    found = run(jobs.verdicts, problem, configs)
    assert [verdict.status for verdict in found] == [Status.OK] * len(configs), [verdict.reason for verdict in found]


@pytest.mark.parametrize(("shape", "layout"), [((17, 18, 70), "nn"), ((1, 33, 64), "nt"), ((33, 1, 5), "tt")], ids=str)
def test_int_mm_is_exact(interpreted: Run, shape: tuple[int, int, int], layout: str) -> None:
    problem = Problem.int_mm(*shape, layout=layout, **CPU)
    assert_right(interpreted, problem, SPLIT if shape[2] > 32 else PLAIN)


def test_the_epilogue_of_int_mm_gets_the_sum_as_float32(interpreted: Run) -> None:
    scale = torch.zeros(17, 1, dtype=torch.float16)
    epilogue = trace(lambda acc, x: acc * x, torch.float32, [scale])
    plain = Problem.int_mm(17, 18, 70, **CPU)
    problem = replace(plain, epilogue=epilogue, out=replace(plain.out, dtype=torch.float16))
    assert_right(interpreted, problem, PLAIN, SPLIT)


@pytest.mark.parametrize(
    ("dtypes", "scales"),
    [((E4M3, E4M3), "tensor"), ((E5M2, E4M3), "row"), ((E4M3, E5M2), "block_1x128"), ((E4M3, E4M3), "block_128x128")],
    ids=["e4m3-tensor", "e5m2-e4m3-row", "e4m3-e5m2-block_1x128", "e4m3-block_128x128"],
)
def test_scaled_mm(interpreted: Run, dtypes: tuple[torch.dtype, torch.dtype], scales: Any) -> None:
    n, k = (140, 150) if scales.startswith("block") else (40, 70)
    problem = Problem.scaled_mm(3, n, k, dtype=dtypes[0], dtype_b=dtypes[1], scales=scales, **CPU)
    assert_right(interpreted, problem, SPLIT)


def test_scaled_mm_with_fast_accum_a_bias_and_another_layout(interpreted: Run) -> None:
    bias = torch.zeros(18, dtype=torch.bfloat16)
    problem = Problem.scaled_mm(17, 18, 70, layout="nn", fast_accum=True, out_dtype=torch.float32, **CPU)
    assert_right(interpreted, replace(problem, epilogue=trace(lambda acc, x: acc + x, torch.float32, [bias])), PLAIN)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_every_8_bit_float_becomes_its_value(interpreted: Run, dtype: torch.dtype) -> None:
    b = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).reshape(16, 16)
    problem = Problem.mixed_mm(16, 16, 16, dtype=torch.float32, dtype_b=dtype, layout="nn", **CPU)
    for row in (0, 7, 8, 15):
        # Rows of zeros, subnormal, normal and special numbers, one at a time because NaN times 0 is NaN.
        a = torch.zeros(16, 1).index_fill(0, torch.tensor([row]), 1.0)
        one = replace(problem, a=Layout.of(a), b=Layout.of(b[row : row + 1]))
        got = interpreted(jobs.result, one, PLAIN, a, b[row : row + 1], ())
        torch.testing.assert_close(got[row], b[row].float(), rtol=0, atol=0, equal_nan=True)


WEIGHTS: dict[str, dict[str, Any]] = {
    "int8": {},
    "uint8-column": {"dtype_b": torch.uint8, "scales": "column"},
    "uint8-column-zeros": {"dtype_b": torch.uint8, "scales": "column", "zeros": True},
    "int8-tensor-zeros": {"scales": "tensor", "zeros": True},
    "int8-group": {"scales": "group_64"},
    "int4-group": {"encoding": "int4", "scales": "group_128"},
    "int4": {"encoding": "int4"},
    "uint4-group-zeros": {"encoding": "uint4", "scales": "group_64", "zeros": True},
    "uint4-tensor-zeros-f32": {"encoding": "uint4", "scales": "tensor", "zeros": True, "scale_dtype": torch.float32},
}
FLOAT_WEIGHTS: dict[str, dict[str, Any]] = {
    "e4m3-group": {"dtype_b": E4M3, "scales": "group_32"},
    "e5m2-column-zeros": {"dtype_b": E5M2, "scales": "column", "zeros": True},
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize(("turn", "name"), rotated([*enumerate([*WEIGHTS, *FLOAT_WEIGHTS])], 2, "mixed"), ids=str)
def test_mixed_mm(interpreted: Run, turn: int, name: str) -> None:
    """Test each kind of weight; the dtypes of a and the layouts rotate."""
    dtype, layout = DTYPES[turn % 3], ("nt", "tn", "nn", "tt")[turn % 4]
    problem = Problem.mixed_mm(9, 18, 134, dtype=dtype, layout=layout, **(WEIGHTS | FLOAT_WEIGHTS)[name], **CPU)
    assert_right(interpreted, problem, SPLIT if dtype == torch.float16 else PLAIN)


@pytest.mark.parametrize(("turn", "name"), rotated([*enumerate(WEIGHTS)], 2, "words"), ids=str)
def test_mixed_mm_by_words(interpreted: Run, turn: int, name: str) -> None:
    dtype = DTYPES[turn % 2]
    problem = Problem.mixed_mm(9, 40, 128, dtype=dtype, **WEIGHTS[name], **CPU)
    assert_right(interpreted, problem, replace(WORDS, split_k=2, steps=2) if dtype == torch.float16 else replace(WORDS, swap=False))


@pytest.mark.parametrize(("m", "name", "dtype"), [(1, "int8", DTYPES[0]), (2, "uint8-column", DTYPES[1])], ids=str)
def test_few_rows_by_words_without_tensor_cores(interpreted: Run, name: str, dtype: torch.dtype, m: int) -> None:
    bias = torch.zeros(42, dtype=torch.float16)
    epilogue = trace(lambda acc, x: torch.relu(acc + x), torch.float32, [bias])
    problem = replace(Problem.mixed_mm(m, 42, 192, dtype=dtype, **WEIGHTS[name], **CPU), epilogue=epilogue)
    assert_right(interpreted, problem, Config(block_m=m, block_n=8, block_k=64, stages=2, warps=1))


def test_words_with_an_epilogue_and_one_row(interpreted: Run) -> None:
    bias = torch.zeros(48, dtype=torch.float16)
    problem = Problem.mixed_mm(1, 48, 192, encoding="int4", scales="group_64", **CPU)
    epilogue = trace(lambda acc, x: torch.relu(acc + x), torch.float32, [bias])
    assert_right(interpreted, replace(problem, epilogue=epilogue), WORDS, replace(WORDS, split_k=3))


STRIDED = {
    "padded columns": Layout(size=(70, 18), stride=(1, 80), dtype=torch.int8),
    "padded rows, offset": Layout(size=(70, 18), stride=(23, 1), dtype=torch.int8, offset=3),
    "repeated": Layout(size=(70, 18), stride=(1, 0), dtype=torch.int8),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_weights(interpreted: Run, name: str) -> None:
    problem = replace(Problem.mixed_mm(17, 18, 70, scales="column", **CPU), b=STRIDED[name])
    assert_right(interpreted, problem, PLAIN)


def test_strided_scales(interpreted: Run) -> None:
    scale = Layout(size=(3, 18), stride=(2, 7), dtype=torch.float16, offset=1)
    problem = replace(Problem.mixed_mm(17, 18, 192, scales="group_64", **CPU), scale_b=scale)
    assert_right(interpreted, problem, PLAIN, WORDS)


def test_packed_rows_are_low_nibble_first(interpreted: Run) -> None:
    a, b, scale, zero, weights = mixed_operands(
        17, 18, 64, dtype=torch.float32, encoding="uint4", scales="column", zeros=True, scale_dtype=torch.float32
    )
    assert scale is not None
    assert zero is not None
    plain = Problem.mixed_mm(17, 18, 64, dtype=torch.float32, encoding="uint4", scales="column", zeros=True, **CPU)
    problem = replace(plain, a=Layout.of(a), b=Layout.of(b), scale_b=Layout.of(scale), zero_b=Layout.of(zero))
    got = interpreted(jobs.result, problem, PLAIN, a, b, (scale, zero))
    torch.testing.assert_close(got.double(), a.double() @ weights, rtol=1e-5, atol=1e-4)
