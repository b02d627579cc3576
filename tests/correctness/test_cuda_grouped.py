"""Cuda kernels of grouped products, run on the CPU thread by thread, also with invalid offsets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cpp_kernels import needs_compiler
from cuda_cases import BF16, F16, F32, INT4, UINT4, UINT8, choice, gated, grouped_shape, mixed_groups, wgmma_shape
from cuda_cases import biased as with_bias
from cuda_kernels_on_cpu import assert_right, kernel
from rotation import rotated

from gemmtune.problem import Problem


def rows(m: int, n: int, k: int, groups: int, layout: str = "nt", dtype: torch.dtype = BF16) -> Problem:
    return Problem.grouped_mm(m, n, k, groups=groups, layout=layout, dtype=dtype, device_type="cuda")


def terms(m: int, n: int, k: int, groups: int, dtype: torch.dtype = BF16) -> Problem:
    return Problem.grouped_k_mm(m, n, k, groups=groups, dtype=dtype, device_type="cuda")


def fitted(block_n: int, stages: int, cluster_n: int = 1) -> Any:
    return grouped_shape(block_n, stages, cluster_n=cluster_n, fitted=32)


def unsigned(problem: Problem) -> Problem:
    return dataclasses.replace(problem, b=dataclasses.replace(problem.b, dtype=UINT8))


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
    "fitted-in-two-turns": (
        rows(90, 304, 136, 3, "nn"),
        grouped_shape(48, 2, block_m=256, fitted=16),
        {"blocks": 2, "swap_ab": True},
    ),
    "fitted-in-two-turns-beside": (
        with_bias(rows(70, 333, 72, 2)),
        grouped_shape(32, 2, block_m=256, cluster_n=2, fitted=16),
        {"blocks": 2, "swap_ab": True},
    ),
    "fitted-float32": (with_bias(rows(140, 133, 72, 2)), fitted(128, 2), {"blocks": 1, "swap_ab": True, "strip": 1}),
    "terms": (terms(136, 200, 300, 5), grouped_shape(64, 2), {"blocks": 2}),
    "terms-wide": (terms(136, 264, 150, 2), grouped_shape(256, 2, cluster_n=2), {"blocks": 2}),
    "terms-below-each-other": (terms(264, 136, 200, 3, F16), grouped_shape(64, 2, cluster_m=2), {"blocks": 2}),
}


NARROW = wgmma_shape(32, 1, 1, 64, 2)
WIDENED: dict[str, tuple[Problem, Any, dict[str, Any]]] = {
    "int4-group-32": (mixed_groups(80, 72, 288, 3, **INT4, scales="group_32"), wgmma_shape(40, 2, 1, 64, 2), {}),
    "int4-group-128-two-tiles": (
        mixed_groups(45, 200, 384, 2, **INT4, scales="group_128", dtype=F16),
        wgmma_shape(40, 2, 2, 64, 2),
        {},
    ),
    "uint4-column": (mixed_groups(40, 44, 160, 3, **UINT4, dtype=F16), NARROW, {}),
    "int4-group-64-two-blocks": (
        mixed_groups(40, 64, 320, 3, **INT4, scales="group_64", scale_dtype=F32),
        NARROW,
        {"cluster_k": 2},
    ),
    "int8-column-unaligned": (mixed_groups(50, 69, 144, 3, dtype=F16), NARROW, {}),
    "int8-group-32-gated": (gated(mixed_groups(50, 72, 96, 3, scales="group_32")), NARROW, {}),
    "uint8-float32-result": (
        with_bias(unsigned(mixed_groups(40, 67, 272, 2, scales="column"))),
        NARROW,
        {"cluster_k": 2, "interleaved_k": True},
    ),
    "int4-one-group": (mixed_groups(45, 70, 64, 1, **INT4), NARROW, {}),
}
"""Cases with signed and unsigned 4-bit and 8-bit weights, column and group scales, remainders of all sizes, and divided K."""


VERIFIED = {f"{kind}{name}": case for kind, cases in (("", CASES), ("widened-", WIDENED)) for name, case in cases.items()}


@pytest.mark.turn(0, 3)
@needs_compiler
@pytest.mark.parametrize("name", rotated([*VERIFIED], len(VERIFIED), "grouped"))
def test_groups_of_all_sizes_pass_verification(name: str) -> None:
    problem, shape, told = VERIFIED[name]
    assert_right(choice(problem, shape, **told))


def run_of_ones(problem: Problem, shape: Any, **told: Any) -> Callable[..., None]:
    """Return the kernel as a function of the result's memory, group offsets and optional scales."""
    run = kernel(dataclasses.replace(choice(problem, shape, **told), problem=dataclasses.replace(problem, device_type="cpu"))).run
    a = torch.ones(problem.a.size, dtype=problem.dtype)
    b = torch.full(problem.b.transposed.size, 0x11 if problem.encoding else 1).to(problem.b.dtype).mT

    def with_ends(out: torch.Tensor, ends: Sequence[int], scale: torch.Tensor | None = None) -> None:
        scales = [torch.ones(x.size, dtype=x.dtype) if scale is None else scale for x in problem.scales]
        run(out, (a, b, *scales, torch.tensor(ends, dtype=torch.int32)), ())

    return with_ends


ONES: dict[str, tuple[Problem, Any, dict[str, Any]]] = {
    "swapped": (rows(40, 136, 72, 4), grouped_shape(16, 2), {"blocks": 2, "swap_ab": True}),
    "fitted": (rows(40, 136, 72, 4), fitted(32, 2, cluster_n=2), {"blocks": 2, "swap_ab": True}),
    "narrow": (mixed_groups(40, 136, 96, 4, **INT4, scales="group_32"), NARROW, {}),
}


@pytest.mark.turn(1, 3)
@needs_compiler
@pytest.mark.parametrize("name", rotated([*ONES], len(ONES), "ones"))
def test_invalid_offsets_write_only_the_result(name: str) -> None:
    problem, shape, told = ONES[name]
    run = run_of_ones(problem, shape, **told)
    for ends in ([9, 3, 4000, 12], [-7, 5, 2, 99], [2**31 - 1, -(2**31), 40, 41]):
        memory = torch.full((60, 136), -1.0, dtype=BF16)
        run(memory[10:50], ends)
        assert (memory[:10] == -1).all()
        assert (memory[50:] == -1).all()
        assert {*memory[10:50].unique().tolist()} <= {-1.0, float(problem.k)}


@pytest.mark.turn(2, 3)
@needs_compiler
def test_many_groups_read_only_their_own_scales() -> None:
    """Check more groups than lanes and a K below one stage. Every fifth group is empty, every third has NaN scales."""
    problem = mixed_groups(80, 40, 96, 36, **INT4, scales="group_32")
    of_row = torch.tensor([group for group in range(36) if group % 5 for _ in range(1 + group % 3)])
    ends = torch.searchsorted(of_row, torch.arange(36), right=True)
    scale = torch.where(torch.arange(36) % 3 == 1, torch.nan, torch.arange(36) + 1.0).to(BF16)
    memory = torch.full((problem.m, 40), -1.0, dtype=BF16)
    run_of_ones(problem, NARROW)(memory, ends.tolist(), scale[:, None, None].expand(36, 3, 40).contiguous())
    out = memory[: len(of_row)]
    assert torch.equal(out.nan_to_num(-7), (scale[of_row] * 96).nan_to_num(-7)[:, None].expand_as(out))
    assert (memory[len(of_row) :] == -1).all()
