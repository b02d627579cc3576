"""The cuda kernels of grouped products on the CPU, thread by thread: verified, and with offsets that are none."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cpp_kernels import needs_compiler
from cuda_cases import BF16, F16, choice, gated, grouped_shape
from cuda_cases import biased as with_bias
from cuda_kernels_on_cpu import assert_right, kernel
from rotation import rotated

from gemmtune.problem import Problem


def rows(m: int, n: int, k: int, groups: int, layout: str = "nt", dtype: torch.dtype = BF16) -> Problem:
    return Problem.grouped_mm(m, n, k, groups=groups, layout=layout, dtype=dtype, device_type="cuda")


def terms(m: int, n: int, k: int, groups: int, dtype: torch.dtype = BF16) -> Problem:
    return Problem.grouped_k_mm(m, n, k, groups=groups, dtype=dtype, device_type="cuda")


def fitted(block_n: int, stages: int, cluster_n: int = 1) -> Any:
    return grouped_shape(block_n, stages, cluster_n=cluster_n, fitted=True)


CASES: dict[str, tuple[Problem, Any, dict[str, Any]]] = {
    "nt": (rows(300, 136, 152, 5), grouped_shape(64, 3), {"blocks": 2}),
    "nn-more-groups-than-lanes": (rows(70, 136, 136, 40, "nn", F16), grouped_shape(32, 3), {"blocks": 3, "swap_ab": True}),
    "few-rows": (rows(37, 136, 72, 3), grouped_shape(16, 2), {"blocks": 1, "swap_ab": True}),
    "below-each-other": (rows(520, 136, 152, 3, "nn"), grouped_shape(64, 2, cluster_m=2), {"blocks": 4, "strip": 1}),
    "wide-lines-across-k": (rows(300, 264, 72, 2, "nn"), grouped_shape(128, 2, cluster_m=2), {"blocks": 4}),
    "beside-each-other": (rows(264, 250, 152, 4), grouped_shape(64, 2, cluster_n=2), {"blocks": 4, "strip": 2}),
    "gated": (gated(rows(150, 136, 72, 2)), grouped_shape(64, 2), {"blocks": 2}),
    "float32-result-unaligned": (with_bias(rows(150, 133, 72, 2)), grouped_shape(64, 2), {"blocks": 2}),
    "fitted": (rows(300, 136, 152, 3), fitted(96, 2), {"blocks": 2, "swap_ab": True}),
    "fitted-beside": (rows(150, 200, 136, 6, "nn", F16), fitted(64, 3, cluster_n=2), {"blocks": 4, "swap_ab": True}),
    "fitted-float32": (with_bias(rows(140, 133, 72, 2)), fitted(128, 2), {"blocks": 1, "swap_ab": True, "strip": 1}),
    "terms": (terms(136, 200, 300, 5), grouped_shape(64, 2), {"blocks": 2}),
    "terms-wide": (terms(136, 264, 150, 2), grouped_shape(256, 2, cluster_n=2), {"blocks": 2}),
    "terms-below-each-other": (terms(264, 136, 200, 3, F16), grouped_shape(64, 2, cluster_m=2), {"blocks": 2}),
}


@needs_compiler
@pytest.mark.parametrize("name", rotated([*CASES], len(CASES), "grouped"))
def test_groups_are_right_whatever_their_sizes(name: str) -> None:
    problem, shape, told = CASES[name]
    assert_right(choice(problem, shape, **told))


@needs_compiler
@pytest.mark.parametrize("shape", [grouped_shape(16, 2), fitted(32, 2, cluster_n=2)], ids=str)
def test_offsets_that_are_no_offsets_touch_nothing_else(shape: Any) -> None:
    problem = rows(40, 136, 72, 4)
    one = choice(problem, shape, blocks=2, swap_ab=True)
    run = kernel(dataclasses.replace(one, problem=dataclasses.replace(problem, device_type="cpu"))).run
    a, b = torch.ones(40, 72, dtype=BF16), torch.ones(4, 136, 72, dtype=BF16)
    for ends in ([9, 3, 4000, 12], [-7, 5, 2, 99], [2**31 - 1, -(2**31), 40, 41]):
        memory = torch.full((60, 136), -1.0, dtype=BF16)
        run(memory[10:50], (a, b, torch.tensor(ends, dtype=torch.int32)), ())
        assert (memory[:10] == -1).all()
        assert (memory[50:] == -1).all()
        assert {*memory[10:50].unique().tolist()} <= {-1.0, 72.0}
