"""Times that no machine can reach, and the limits that say so."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemmtune.declaration.traits import Traits
from gemmtune.device import detect
from gemmtune.judging import calls, speed
from gemmtune.judging.levels import LEVELS
from gemmtune.problem import Problem
from gemmtune.timing.limits import Limits, limit_names
from gemmtune.untrusted.candidate import Candidate
from gemmtune.untrusted.conduct import Conduct
from gemmtune.untrusted.shape import Shape
from gemmtune.untrusted.target import TORCH
from gemmtune.untrusted.turns import Turns


def limits_of(rate: float) -> Limits:
    return Limits(values=dict.fromkeys(limit_names(PROBLEM.dtype_label), rate))


PROBLEM = Problem.mm(512, 512, 512)
FAST = Shape(problem=PROBLEM, calls=9, pairs=((1e-6, 1e-3),) * 9)


def test_too_fast_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_limits", lambda *_: limits_of(1.0))
    monkeypatch.setattr(speed, "_measured", lambda *_: limits_of(2.0))
    candidate = Candidate(TORCH)
    found = speed.judge_speed(candidate, [FAST])
    assert found is not None
    assert found.ratio == pytest.approx(1000)
    assert [x.kind for x in candidate.findings] == [Conduct.TOO_FAST]


def test_limits_that_were_too_low_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work lowers what the machine seems to be able to do, and not what it can."""
    monkeypatch.setattr(speed, "_limits", lambda *_: limits_of(1.0))
    monkeypatch.setattr(speed, "_measured", lambda *_: limits_of(1e6))
    candidate = Candidate(TORCH)
    speed.judge_speed(candidate, [FAST])
    monkeypatch.setattr(speed, "_measured", lambda *_: limits_of(PROBLEM.flops / 1e3 / 15))  # 15 times the time of the GEMM
    speed.judge_speed(candidate, [FAST], busy="other processes used 80% of the cores")
    assert candidate.findings == ()


def test_limits_are_measured_with_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(speed, "measure_limits", lambda device, _: seen.append((device.threads, torch.get_num_threads())) or {})
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    speed._measured(detect("cpu"), "float32")
    assert seen == [(cores, cores)]
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "float32", "float16"), ("bfloat16", "float32"), ("float32", "float64"), ("int8",)], ids=str
)
def test_float32_is_timed_first(dtypes: tuple[str, ...]) -> None:
    """On a busy machine the first shape alone is timed. The others have all dtypes in turn."""
    rng = random.Random(1)
    trial: Any = SimpleNamespace(rng=rng, turns=Turns(rng), pace_s=1e-9)
    subject: Any = SimpleNamespace(traits=Traits())
    planned = list(calls._plan(trial, subject, LEVELS["normal"], {"mm": dtypes}, ((), ()), (), on_gpu=False))
    timed = [x.case.dtype for x in planned if x.timed]
    assert timed[0] == ("float32" if "float32" in dtypes else dtypes[0])
    assert (len(timed), set(timed)) == (4, set(dtypes))
    assert {x.case.dtype for x in planned if not x.timed} >= set(dtypes[:2])
