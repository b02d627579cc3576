"""Products of scaled 8-bit floats by the cpp backend for every instruction set of this machine."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cpp_kernels import CPU, as_shipped, call, choice_for, legal, needs_compiler, on_each_isa
from quantized_operands import exact_operands
from rotation import rotated

from gemmtune.choice import Status
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.verify import Verifier

pytestmark = [needs_compiler, pytest.mark.rotates(8)]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WAYS = [{"mr": 3, "mode": mode, "direct": direct} for mode in ("steps", "columns", "dots") for direct in (False, True)]
SCALES = ("tensor", "row", "block_1x128", "block_128x128")


def scaled(m: int, n: int, k: int, **changes: object) -> Problem:
    values = {"dtype": E4M3, "dtype_b": E5M2, "out_dtype": torch.float32, "device_type": "cpu"} | changes
    return Problem.scaled_mm(m, n, k, **values)


def assert_exact(problem: Problem, arch: str) -> int:
    a, b, scales, expected = exact_operands(problem, problem.m)
    ways = [way for way in WAYS if legal(problem, arch, **way)]
    for way in ways:
        got = call(problem, arch, a, b, extra=scales, **way)
        assert torch.equal(got, expected.to(problem.out.dtype)), f"{problem} {way}"
    return len(ways)


@on_each_isa
@pytest.mark.parametrize("scales", SCALES)
def test_scales_cover_their_blocks(arch: str, scales: str) -> None:
    for layout in ("nt", "nn", "tn", "tt"):
        for m, n, k in ((3, 150, 300), (20, 37, 128), (1, 129, 129)):
            problem = scaled(m, n, k, scales=scales, layout=layout)
            assert assert_exact(problem, arch) >= 2
            assert assert_exact(dataclasses.replace(problem, prepacked=True), arch) >= 2


@on_each_isa
def test_square_blocks_of_both_operands(arch: str) -> None:
    problem = scaled(140, 150, 300, scales="block_128x128")
    square = Layout.contiguous((2, 3), torch.float32)
    assert_exact(dataclasses.replace(problem, scale_a=square), arch)


@on_each_isa
@pytest.mark.parametrize("scales", SCALES)
def test_a_column_major_result(arch: str, scales: str) -> None:
    problem = scaled(40, 37, 300, scales=scales)
    problem = dataclasses.replace(problem, out=Layout(size=(40, 37), stride=(1, 40), dtype=torch.float32))
    assert assert_exact(problem, arch) >= 2


@on_each_isa
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_are_rounded_once(arch: str, out_dtype: torch.dtype) -> None:
    assert assert_exact(scaled(9, 70, 200, scales="row", out_dtype=out_dtype), arch) >= 2


@pytest.mark.turn(1, 8)
@as_shipped
@on_each_isa
@pytest.mark.parametrize("dtypes", rotated([(E4M3, E4M3), (E5M2, E4M3)], 2, "bias"), ids=str)
def test_verified_with_a_bias(arch: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    bias = torch.randn(70).bfloat16()
    graph = trace(lambda acc, x: acc + x, torch.float32, (bias,))
    for scales in rotated(("row", "block_128x128"), 2, arch):
        problem = scaled(9, 70, 300, dtype=dtypes[0], dtype_b=dtypes[1], scales=scales, out_dtype=torch.bfloat16)
        problem = dataclasses.replace(problem, epilogue=graph)
        verifier = Verifier(problem, CPU)
        for way in WAYS:
            if legal(problem, arch, **way):
                choice = choice_for(problem, arch, **way)
                verdict = verifier.check(choice, choice.build())
                assert verdict.status == Status.OK, f"{choice}: {verdict.reason}"
