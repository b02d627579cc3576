"""Persistent kernels: values in Triton's interpreter, and properties of the compiled kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rotation import rotated

from gemmtune.architectures import inspect_choices
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.persistent import persistent_choices
from gemmtune.choice import Status
from gemmtune.device import preset
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace

pytest.importorskip("triton", reason="the interpreter and the compiler are Triton's")

import triton_jobs
from interpreter import Run

pytestmark = pytest.mark.rotates(8)

CONFIGS = [
    Config(block_m=32, block_n=16, block_k=16, stages=2, warps=4, group_m=2),
    Config(block_m=128, block_n=256, block_k=64, stages=2, warps=8),
]
"""Configs; the second stores its tile in two halves."""


def _errors(interpreted: Run, problem: Problem, *, nan_inp: bool = False) -> float:
    return float(max(interpreted(triton_jobs.errors, problem, CONFIGS, family=triton_jobs.persistent, nan_inp=nan_inp)))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    rotated([*itertools.product(("nn", "nt", "tn", "tt"), (torch.float16, torch.bfloat16))], 2, "persistent mm"),
    ids=str,
)
def test_mm(interpreted: Run, dtype: torch.dtype, layout: str) -> None:
    assert _errors(interpreted, Problem.mm(152, 280, 136, dtype=dtype, layout=layout, device_type="cpu")) <= 1


SHAPES = [(128, 256, 64), (129, 264, 72), (1, 8, 8), (65, 40, 200), (300, 8, 16)]


@pytest.mark.parametrize("shape", rotated(SHAPES, 2, "persistent edges"), ids=str)
def test_mm_at_the_edges_of_tiles(interpreted: Run, shape: tuple[int, int, int]) -> None:
    assert _errors(interpreted, Problem.mm(*shape, dtype=torch.float16, device_type="cpu")) <= 1


@pytest.mark.parametrize("bias", rotated(["n", "mn", "m1", "1n", "scalar"], 2, "bias"))
def test_bias_shapes(interpreted: Run, bias: Any) -> None:
    problem = Problem.addmm(72, 264, 80, dtype=torch.float16, bias=bias, alpha=2, beta=0.5, device_type="cpu")
    assert _errors(interpreted, problem) <= 1


def test_a_bias_that_is_not_read(interpreted: Run) -> None:
    problem = Problem.addmm(40, 48, 64, dtype=torch.float16, beta=0, device_type="cpu")
    assert _errors(interpreted, problem, nan_inp=True) <= 1


EPILOGUES: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "column": (lambda acc, x: acc * x, ((72, 1),)),
    "row-and-block": (lambda acc, x, y: acc / (torch.abs(x) + 2) + y, ((264,), (72, 264))),
    "scalar": (lambda acc, x: torch.nn.functional.silu(acc + x), ((),)),
}


@pytest.mark.parametrize("name", rotated(list(EPILOGUES), 2, "persistent epilogues"))
def test_epilogues(interpreted: Run, name: str) -> None:
    function, sizes = EPILOGUES[name]
    extra = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
    problem = Problem.mm(72, 264, 80, dtype=torch.bfloat16, device_type="cpu")
    assert _errors(interpreted, replace(problem, epilogue=trace(function, torch.float32, extra))) <= 1


def _layout(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Layout:
    return Layout(size=size, stride=stride, dtype=torch.float16, offset=offset)


A, B = _layout((70, 80), (88, 1)), _layout((80, 40), (1, 96))
STRIDED = {
    "pitch": (A, B, _layout((70, 40), (48, 1))),
    "columns-that-are-no-multiple": (_layout((70, 79), (80, 1)), _layout((79, 37), (40, 1)), _layout((70, 37), (40, 1))),
    "out-unaligned": (A, B, _layout((70, 40), (41, 1), 3)),
    "out-by-columns": (A, B, _layout((70, 40), (1, 72))),
    "out-strided": (A, B, _layout((70, 40), (100, 2))),
}


@pytest.mark.parametrize("name", rotated(list(STRIDED), 2, "persistent strides"))
def test_strided_operands(interpreted: Run, name: str) -> None:
    a, b, out = STRIDED[name]
    assert _errors(interpreted, Problem(op="mm", a=a, b=b, out=out)) <= 1


@pytest.mark.turn(1, 8)
def test_verification_accepts_the_kernels_with_their_own_claims(interpreted: Run) -> None:
    problem = Problem.addmm(72, 264, 200, dtype=torch.bfloat16, bias="m1", alpha=2, beta=0.5, device_type="cpu")
    found = interpreted(triton_jobs.verdicts, problem, CONFIGS, family=triton_jobs.persistent)
    assert [verdict.status for verdict in found] == [Status.OK, Status.OK], [verdict.reason for verdict in found]


def _silu(acc: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(acc) * x


COMPILED = {
    "bf16-nt": Problem.mm(2048, 2048, 2048, device_type="cuda"),
    "f16-tn-odd-out": Problem.mm(1024, 1023, 4096, dtype=torch.float16, layout="tt", device_type="cuda"),
    "addmm-f16-nn": Problem.addmm(512, 6144, 4096, dtype=torch.float16, layout="nn", bias="mn", beta=0.5, device_type="cuda"),
    "bf16-nt-silu-mul": replace(
        Problem.mm(1024, 1024, 1024, device_type="cuda"),
        epilogue=trace(_silu, torch.float32, [torch.zeros(1024, 1024, dtype=torch.bfloat16)]),
    ),
}


@pytest.mark.turn(3, 8)
@pytest.mark.parametrize(("name", "arch"), rotated([*itertools.product(COMPILED, ("sm90", "sm100"))], 2, "persistent"))
def test_choices_compile_within_predicted_resources_to_the_expected_instructions(arch: str, name: str) -> None:
    device, problem = preset(arch), COMPILED[name]
    choices = rotated(persistent_choices(problem, device, 6)[::2], 3, f"{arch} {name}")
    assert choices
    inspections = list(inspect_choices(tuple(choices)))
    wrong = [f"{inspection}: {text}" for inspection in inspections for text in inspection.problems]
    assert not wrong, "\n".join(wrong)


def test_blocks_go_through_the_copy_engine_in_both_directions() -> None:
    (choice,) = persistent_choices(COMPILED["bf16-nt"], preset("sm90"), 1)
    code = choice.artifacts(preset("sm90"))[0].code
    wait, trigger = code.index("griddepcontrol.wait"), code.index("griddepcontrol.launch_dependents")
    assert wait < trigger < code.index("cp.async.bulk.tensor.2d.shared")
    assert "cp.async.bulk.tensor.2d.global.shared" in code
    assert "ld.global" not in code
    assert "st.global" not in code
