"""The performance gate on a GPU: blocks of graphs, fresh processes, decisions."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch

from gemmtune import settings
from gemmtune.device import detect
from gemmtune.perf_gate.gate import run_gate
from gemmtune.perf_gate.options import GateOptions
from gemmtune.perf_gate.sampling import FreshProcess, Match, ProcessSample, Sampling, compare
from gemmtune.perf_gate.statistics import Decision
from gemmtune.perf_gate.subjects import TORCH, subject_for
from gemmtune.problem import Problem
from gemmtune.timing.contenders import Call, GraphContender

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

PROBLEM = Problem.mm(512, 1024, 1024, dtype=torch.bfloat16, device_type="cuda")


def spin(cycles: int) -> Call:
    """Return a call of a kernel that takes that many cycles."""
    return functools.partial(torch.cuda._sleep, cycles)


@pytest.mark.parametrize("percent", [0, 5])
@pytest.mark.parametrize("turn", [0, 1])
def test_a_planted_difference_between_kernels_is_measured(percent: int, turn: int) -> None:
    stream = torch.cuda.Stream()
    candidate, reference = (GraphContender([spin(cycles)], stream) for cycles in (1000 * (200 + 2 * percent), 200_000))
    sample = compare(candidate, reference, Sampling.of("cuda"), turn=turn)
    assert sample.log_ratio == pytest.approx(math.log1p(percent / 100), abs=0.01)
    assert sample.blocks == 30


def test_fresh_processes_time_functions_and_choices(own_store: Path) -> None:
    device, chosen = detect("cuda"), settings.current()
    reference = subject_for(TORCH, PROBLEM, device, chosen)
    candidates = [reference, *(subject_for(name, PROBLEM, device, chosen) for name in ("torch:mm", "gate_functions:twice"))]
    process = FreshProcess(device=device, settings=chosen, sampling=Sampling.of("cuda"))
    results = process([Match(problem=PROBLEM, candidate=c, reference=reference) for c in candidates], 0)
    for result, least, most in zip(results, (-0.1, -0.3, 0.4), (0.1, 0.3, 1.1), strict=True):
        assert isinstance(result, ProcessSample), result
        assert least < result.log_ratio < most


def test_the_pick_is_not_slower_than_torch_and_twice_the_work_is(own_store: Path) -> None:
    with settings.patch(search="quick", backends=("aten", "triton")):
        picked = run_gate([PROBLEM], GateOptions(device="cuda", processes=3))
        twice = run_gate([PROBLEM], GateOptions(device="cuda", processes=3, candidate="gate_functions:twice"))
    assert not picked.failed
    assert picked.decision is not Decision.REGRESSED
    assert twice.decision is Decision.REGRESSED
    assert twice.exit_status == 1
