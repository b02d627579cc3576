"""Triton kernels of the quantized operations on a GPU: each family is verified, and results repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gemmtune.backends.table import load
from gemmtune.backends.triton.mixed.offers import words_choices
from gemmtune.backends.triton.vec import words_vector_choices
from gemmtune.choice import Choice, Status
from gemmtune.device import detect
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem
from gemmtune.selector.precompile import precompile
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings, current

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CUDA: dict[str, Any] = {"device_type": "cuda"}


def assert_verified(problem: Problem, choices: Sequence[Choice]) -> None:
    assert choices
    failures = precompile(choices, current())
    assert not failures, failures
    verifier = Verifier(problem, torch.device("cuda", torch.cuda.current_device()))
    for choice in choices:
        verdict = verifier.check(choice, choice.build())
        assert verdict.status is Status.OK, f"{choice.name} for {problem}: {verdict.reason}"


def _quick(problem: Problem, most: int = 4) -> list[Choice]:
    offers = load("triton").enumerate(problem, detect("cuda"), Settings(search="quick"))
    return list(offers.choices)[:: max(1, len(offers.choices) // most)]


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("shape", [(256, 512, 384), (1, 1024, 2048), (16, 96, 4096), (99, 101, 67)], ids=str)
def test_int_mm(shape: tuple[int, int, int], layout: str) -> None:
    problem = Problem.int_mm(*shape, layout=layout, **CUDA)
    assert_verified(problem, _quick(problem))


@pytest.mark.parametrize("fast_accum", [False, True], ids=["precise", "fast"])
@pytest.mark.parametrize("scales", ["tensor", "row", "block_1x128", "block_128x128"])
def test_scaled_mm(scales: Any, *, fast_accum: bool) -> None:
    problem = Problem.scaled_mm(200, 512, 1024, dtype_b=E5M2, scales=scales, fast_accum=fast_accum, **CUDA)
    assert_verified(problem, _quick(problem))


WEIGHTS: dict[str, dict[str, Any]] = {
    "int8": {"scales": "column"},
    "uint8-zeros": {"dtype_b": torch.uint8, "scales": "group_64", "zeros": True},
    "int4": {"encoding": "int4", "scales": "group_128"},
    "uint4-zeros": {"encoding": "uint4", "scales": "column", "zeros": True},
}
OTHERS: dict[str, dict[str, Any]] = {
    "e4m3": {"dtype_b": E4M3, "scales": "group_32"},
    "e5m2-zeros": {"dtype_b": E5M2, "scales": "tensor", "zeros": True},
    "int4-rows": {"encoding": "int4", "scales": "group_128", "layout": "nn"},
    "float32": {"dtype": torch.float32, "scales": "group_64", "zeros": True},
}


@pytest.mark.parametrize("name", [*WEIGHTS, *OTHERS])
def test_mixed_mm(name: str) -> None:
    problem = Problem.mixed_mm(100, 200, 768, **(WEIGHTS | OTHERS)[name], **CUDA)
    assert_verified(problem, [choice for choice in _quick(problem, 20) if "words" not in choice.name][:4])


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [1, 16, 130])
def test_words(m: int, dtype: torch.dtype, name: str) -> None:
    problem = Problem.mixed_mm(m, 520, 1024, dtype=dtype, **WEIGHTS[name], **CUDA)
    choices = words_choices(problem, detect("cuda"), None)
    if not choices:
        pytest.skip("no words template for this device")
    assert_verified(problem, choices[:: max(1, len(choices) // 4)])


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype_b", [torch.int8, torch.uint8], ids=str)
def test_few_rows_by_words_without_tensor_cores(m: int, dtype: torch.dtype, dtype_b: torch.dtype) -> None:
    problem = Problem.mixed_mm(m, 523, 2048, dtype=dtype, dtype_b=dtype_b, scales="column", **CUDA)
    choices = words_vector_choices(problem, detect("cuda"), None)
    if not choices:
        pytest.skip("no words template for this device")
    assert_verified(problem, choices)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_warp_groups_do_not_overtake_their_operands(name: str) -> None:
    problem = Problem.mixed_mm(1024, 2048, 4096, **WEIGHTS[name], **CUDA)
    choices = words_choices(problem, detect("cuda"), None)
    if not choices:
        pytest.skip("no warp groups on this device")
    chosen = choices[:: max(1, len(choices) // 8)]
    assert not precompile(chosen, current())
    x = random_operands(problem, torch.device("cuda", torch.cuda.current_device()), seed=0)
    for choice in chosen:
        kernel, results = choice.build(), []
        for _ in range(20):
            x.out.fill_(torch.nan)
            kernel.run(x.out, x.tensors, ())
            results.append(x.out.clone())
        assert all(torch.equal(results[0], result) for result in results), choice.name
