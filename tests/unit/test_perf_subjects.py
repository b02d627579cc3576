"""Subjects that a gate can time."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gemmtune import settings
from gemmtune.device import detect
from gemmtune.dispatch.ready import plan_for
from gemmtune.errors import GateError, SubjectError
from gemmtune.numerics.operands import random_operands
from gemmtune.perf_gate.options import PICK
from gemmtune.perf_gate.subjects import TORCH, TargetChoice, subject_for
from gemmtune.problem import Problem

CPU = detect("cpu")
PROBLEM = Problem.mm(16, 24, 32, dtype=torch.float32, device_type="cpu")


def test_torch_is_torchs_own_operation():
    choice = subject_for(TORCH, PROBLEM, CPU, settings.current())
    assert (choice.name, choice.baseline) == ("aten:mm", True)


def test_pick_is_the_choice_of_the_plan(own_store):
    with settings.patch(backends=("aten",)) as chosen:
        assert subject_for(PICK, PROBLEM, CPU, chosen) == plan_for(PROBLEM, -1).choice


def test_finds_a_choice_by_name():
    with settings.patch(backends=("aten", "cpp"), search="exhaustive") as chosen:
        assert subject_for("aten:mm", PROBLEM, CPU, chosen).name == "aten:mm"
        with pytest.raises(GateError, match=r"choice: got 'cpp:none', expected one of aten:mm, cpp:"):
            subject_for("cpp:none", PROBLEM, CPU, chosen)


@pytest.mark.parametrize("target", ["perf_functions:matmul", "perf_functions:into"])
def test_a_function_writes_to_out_or_to_new_memory(target):
    choice = subject_for(target, PROBLEM, CPU, settings.current())
    assert (choice.name, choice.backend) == (target, "function")
    kernel, x = choice.build(), random_operands(PROBLEM, CPU.torch_device, seed=1)
    expected = x.a @ x.b
    x.out.zero_()
    for _ in range(2):
        kernel.run(x.out, (x.a, x.b), ())
    assert torch.equal(x.out, expected if target.endswith("into") else torch.zeros_like(expected))
    assert kernel.run_new is not None
    assert torch.equal(kernel.run_new((x.a, x.b), ()), expected)


def test_results_are_kept_so_that_calls_write_to_different_memory():
    choice = TargetChoice.of("perf_functions:matmul", PROBLEM, CPU)
    assert choice.results_kept == 64
    large = Problem.mm(2048, 2048, 8, dtype=torch.float32, device_type="cpu")
    assert TargetChoice.of("perf_functions:matmul", large, dataclasses.replace(CPU, l3_bytes=2**25)).results_kept == 4


def test_rejects_an_empty_product():
    for empty in (Problem.mm(0, 3, 4, device_type="cpu"), Problem.mm(2, 3, 0, device_type="cpu")):
        with pytest.raises(GateError, match="size: got 0, expected a product that takes time"):
            subject_for(TORCH, empty, CPU, settings.current())


def test_a_function_takes_no_packed_operand():
    packed = Problem.mm(16, 24, 32, dtype=torch.float32, device_type="cpu", prepacked=True)
    with pytest.raises(GateError, match="expected a problem without an epilogue and without a packed b"):
        subject_for("perf_functions:matmul", packed, CPU, settings.current())


def test_rejects_a_missing_function():
    with pytest.raises(SubjectError, match="there is no module 'nowhere' here"):
        subject_for("nowhere:matmul", PROBLEM, CPU, settings.current()).build()
