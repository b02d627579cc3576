"""Skinny kernels on the CPU, thread by thread, in tiles with tails and clusters of blocks: for each commit half of the weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cpp_kernels import needs_compiler
from cuda_cases import BF16, F32, INT4, UINT4, UINT8, biased, choice, gated, skinny_shape
from cuda_kernels_on_cpu import kernel
from rotation import rotated

from gemmtune.choice import Status
from gemmtune.problem import Problem
from gemmtune.selector.verify import Verifier

SMALL, BY_K, WIDE = skinny_shape(8, 32, 2, 2, 1), skinny_shape(8, 16, 2, 1, 4), skinny_shape(16, 32, 1, 1, 2)

CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "int4-group-32": (INT4 | {"scales": "group_32"}, BY_K, {}),
    "int4-group-64-zeros": (INT4 | {"scales": "group_64", "zeros": True}, BY_K, {}),
    "uint4-group-32-zeros-wide": (UINT4 | {"scales": "group_32", "zeros": True, "scale_dtype": F32}, WIDE, {}),
    "uint4-column-zeros": (UINT4 | {"scales": "column", "zeros": True}, SMALL, {}),
    "int4-bfloat16": (INT4 | {"dtype": BF16, "scales": "group_64"}, WIDE, {}),
    "uint4-bfloat16-zeros": (UINT4 | {"dtype": BF16, "scales": "group_128", "zeros": True}, SMALL, {}),
    "int8-column": ({"scales": "column"}, BY_K, {}),
    "int8-group-32-zeros": ({"scales": "group_32", "zeros": True}, WIDE, {}),
    "int8-group-128": ({"scales": "group_128", "scale_dtype": F32}, BY_K, {}),
    "uint8-tensor-zeros": ({"dtype_b": UINT8, "scales": "tensor", "zeros": True}, WIDE, {}),
    "int8-bfloat16": ({"dtype": BF16, "scales": "column"}, SMALL, {}),
    "uint8-bfloat16": ({"dtype": BF16, "dtype_b": UINT8, "scales": "group_64"}, BY_K, {}),
    "int4-group-128-two-blocks": (INT4 | {"scales": "group_128"}, SMALL, {"cluster_k": 2}),
    "int8-group-32-three-blocks-interleaved": ({"scales": "group_32"}, BY_K, {"cluster_k": 3, "interleaved_k": True}),
}


@needs_compiler
@pytest.mark.parametrize("name", rotated([*CASES], 2, "skinny"))
def test_every_kind_of_weight_is_right(name: str) -> None:
    fields, shape, told = CASES[name]
    k = 3 * (256 if "encoding" in fields else 128) - 96
    problem = Problem.mixed_mm(shape.block_m - 3, shape.block_n + 8, k, device_type="cuda", **fields)
    if name == "int8-column":
        problem = gated(problem)
    if name == "int8-bfloat16":
        problem = biased(problem)
    here = dataclasses.replace(problem, device_type="cpu")
    chosen = dataclasses.replace(choice(problem, shape, **told), problem=here)
    verdict = Verifier(here, torch.device("cpu")).check(chosen, kernel(chosen))
    assert verdict.status is Status.OK, verdict.reason
