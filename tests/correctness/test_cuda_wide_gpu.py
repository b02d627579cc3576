"""The kernel for more rows on a GPU: every kind of weight with every division of K; tails, epilogues, captures, streams."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from launches import GPU, assert_replayable, assert_right, assert_streams_apart

from gemmtune.backends.cuda.wide.build import WideChoice
from gemmtune.backends.cuda.wide.configs import Config, Shape
from gemmtune.backends.cuda.wide.legality import check_config, check_problem
from gemmtune.device import detect
from gemmtune.errors import ErrorFromChoice
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel runs on SM90 alone"
    ),
]

F16, BF16, F32, UINT8 = torch.float16, torch.bfloat16, torch.float32, torch.uint8
INT4: dict[str, Any] = {"encoding": "int4"}
UINT4: dict[str, Any] = {"encoding": "uint4"}


def shape(rows: int, groups: int, tiles: int, line: int, stages: int, **more: int) -> Shape:
    return Shape(rows=rows, groups=groups, tiles=tiles, line=line, stages=stages, **more)


def mixed(m: int, n: int, k: int, **fields: Any) -> Problem:
    return Problem.mixed_mm(m, n, k, device_type="cuda", **fields)


def gated(problem: Problem) -> Problem:
    """silu(product) · x, x a matrix in the operands' type."""
    x = torch.empty(problem.m, problem.n, dtype=problem.dtype)
    return dataclasses.replace(problem, epilogue=trace(lambda acc, x: torch.nn.functional.silu(acc) * x, F32, [x]))


def biased(problem: Problem) -> Problem:
    """2 · product + x, x a vector in float32; the result in float32."""
    epilogue = trace(lambda acc, x: acc * 2 + x, F32, [torch.empty(problem.n)])
    return dataclasses.replace(problem, epilogue=epilogue, out=dataclasses.replace(problem.out, dtype=F32))


def by_columns(problem: Problem) -> Problem:
    """The result with its columns contiguous."""
    return dataclasses.replace(problem, out=dataclasses.replace(problem.out, stride=(1, problem.m)))


CASES: dict[str, tuple[Problem, Shape]] = {
    "int8-plain": (mixed(64, 1000, 4096), shape(64, 2, 1, 128, 4)),
    "int8-column": (mixed(256, 1032, 2064, scales="column"), shape(256, 2, 1, 64, 4)),
    "int8-one-group": (mixed(33, 520, 4096, scales="column"), shape(64, 1, 1, 128, 4, resident=2)),
    "int8-two-stages": (mixed(200, 777, 2064, scales="column"), shape(256, 2, 1, 64, 2)),
    "int8-two-tiles": (mixed(300, 520, 4096, scales="tensor"), shape(128, 2, 2, 64, 6)),
    "int8-one-row": (mixed(1, 131, 1040, scales="column"), shape(64, 2, 1, 128, 4, batch=2)),
    "int8-group-128": (mixed(96, 520, 4096, scales="group_128"), shape(96, 2, 1, 128, 5)),
    "int8-group-32-zeros": (mixed(70, 520, 2080, scales="group_32", zeros=True), shape(128, 2, 1, 128, 4)),
    "uint8-tensor-zeros": (mixed(130, 520, 4096, dtype_b=UINT8, scales="tensor", zeros=True), shape(128, 2, 1, 128, 3)),
    "int8-bfloat16": (mixed(256, 1000, 4112, dtype=BF16, scales="column"), shape(256, 2, 1, 64, 5)),
    "uint8-bfloat16": (mixed(64, 264, 4096, dtype=BF16, dtype_b=UINT8, scales="group_64"), shape(64, 2, 1, 128, 4)),
    "int4-group-128": (mixed(64, 1000, 4096, **INT4, scales="group_128"), shape(64, 2, 1, 128, 4, batch=2)),
    "int4-group-64": (mixed(133, 520, 3008, **INT4, scales="group_64"), shape(128, 2, 2, 64, 4)),
    "int4-group-32-zeros": (mixed(100, 256, 2048, **INT4, scales="group_32", zeros=True), shape(128, 2, 1, 64, 4)),
    "uint4-group-128-zeros": (mixed(400, 264, 4064, **UINT4, scales="group_128", zeros=True), shape(192, 2, 1, 64, 3)),
    "uint4-column-zeros": (mixed(64, 100, 4096, **UINT4, scales="column", zeros=True), shape(64, 2, 1, 64, 4)),
    "uint4-plain": (mixed(47, 33, 1312, **UINT4), shape(64, 2, 1, 64, 4, resident=2)),
    "int4-bfloat16": (mixed(64, 1000, 4096, dtype=BF16, **INT4, scales="group_128"), shape(64, 2, 1, 64, 8)),
    "uint4-bfloat16-zeros": (mixed(80, 264, 4096, dtype=BF16, **UINT4, scales="group_64", zeros=True), shape(128, 2, 1, 64, 4)),
    "int4-float32-scales": (mixed(64, 264, 4096, **INT4, scales="group_128", scale_dtype=F32), shape(64, 2, 1, 128, 4)),
    "int8-by-columns": (by_columns(mixed(72, 264, 2048, scales="column")), shape(64, 2, 1, 128, 4)),
    "gated": (gated(mixed(64, 264, 4096, **INT4, scales="group_128")), shape(64, 2, 1, 128, 4)),
    "biased": (biased(mixed(211, 131, 4096, dtype=BF16, scales="column")), shape(128, 2, 1, 128, 4)),
}


def choices_of(name: str) -> list[WideChoice]:
    """Every division of K among blocks, in pieces and in turns."""
    problem, one = CASES[name]
    device = detect("cuda")
    assert check_problem(problem, device) is None
    configs = [
        Config(shape=one, blocks=blocks, takes_turns=turns, pdl=pdl, ahead=one.stages if pdl else 0)
        for blocks, turns, pdl in ((1, False, True), (2, False, True), (3, True, False), (4, False, False))
    ]
    legal = [config for config in configs if check_config(problem, device, config) is None]
    assert legal, [check_config(problem, device, config) for config in configs]
    return [WideChoice.of(config, problem, device) for config in legal]


@pytest.mark.parametrize("name", CASES)
def test_every_division_of_k_is_right(name: str) -> None:
    assert_right(CASES[name][0], choices_of(name))


@pytest.mark.parametrize("name", ["int4-group-128", "int8-column", "gated"])
def test_a_capture_may_have_the_first_call_and_can_be_replayed(name: str) -> None:
    assert_replayable(choices_of(name)[0])


@pytest.mark.parametrize("name", ["int4-group-128", "int8-plain"])
def test_calls_of_several_streams_give_the_same_bits(name: str) -> None:
    assert_streams_apart(choices_of(name)[1])


def test_a_product_that_the_next_one_reads_is_finished() -> None:
    """With overlapping launches on one stream, each of which has the result of the last one for a."""
    problem, one = mixed(64, 4096, 4096, **INT4, scales="group_128"), CASES["int4-group-128"][1]
    configs = [Config(shape=one, blocks=2), *(Config(shape=one, blocks=2, pdl=True, ahead=ahead) for ahead in (0, 4))]
    runs = [WideChoice.of(config, problem, detect("cuda")).build().run for config in configs]
    x = random_operands(problem, GPU, seed=5)
    assert x.scale_b is not None
    small = x.scale_b / x.scale_b.max() / 320  # int4's mean is not zero: rows grow fourfold with each product
    results = []
    for run in runs:
        rows = [x.a, *(torch.full_like(x.a, float("nan")) for _ in range(8))]
        for before, after in itertools.pairwise(rows):
            run(after, (before, x.b, small), ())
        results.append(rows)
    torch.cuda.synchronize()
    assert all(row.isfinite().all() for row in results[0])
    for rows in results[1:]:
        assert all(torch.equal(first, second) for first, second in zip(results[0], rows, strict=True))


def test_an_address_that_is_not_aligned_is_refused() -> None:
    choice = choices_of("int8-plain")[0]
    x = random_operands(choice.problem, GPU, seed=7)
    moved = torch.empty(x.a.numel() + 1, dtype=x.a.dtype, device=GPU)[1:].view(x.a.shape)
    with pytest.raises(ErrorFromChoice, match="an operand is not aligned as planned"):
        choice.build().run(x.out, (moved, x.b), ())
