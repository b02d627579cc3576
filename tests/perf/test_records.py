"""Records for pytest-benchmark: how long gemmtune's picks take, with everything by which to tell one record from another.

They are kept with ``pytest tests/perf/test_records.py --benchmark-enable --benchmark-json=FILE``. Nothing is judged here; the gate
does that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmtune import settings
from gemmtune.choice import Choice
from gemmtune.device import DeviceInfo, detect
from gemmtune.dispatch.ready import plan_for
from gemmtune.perf_gate.gate import versions
from gemmtune.perf_gate.subjects import TORCH, subject_for
from gemmtune.problem import Problem
from gemmtune.settings import Settings
from gemmtune.timing.contenders import Contender
from gemmtune.timing.timer import Timer, collection_paused, conditions
from gemmtune.version import __version__


class DeviceClock:
    """A timer for pytest-benchmark that goes forward by the time of one call for each sample, and stands still otherwise.

    Samples are those of ``selector.timing.timer``: between CUDA events on a GPU, between readings of the clock on a CPU.
    """

    __name__ = "device_clock"
    """By which pytest-benchmark names it in its tables."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self._now_s

    def sample(self, contender: Contender) -> float:
        """Take one sample of a contender, in µs for one call, and go forward by as much."""
        time_us = contender.sample_us()
        self._now_s += time_us * 1e-6
        return time_us


def extra_info(problem: Problem, choice: Choice, device: DeviceInfo, settings: Settings) -> dict[str, Any]:
    """Plain values that tell a record from every other: the whole problem, the choice, the device, the versions."""
    return {
        "problem": str(problem),
        "key": problem.to_json(),
        "choice": choice.name,
        "content_hash": choice.content_hash,
        "device": device.name,
        "versions": {"gemmtune": __version__} | versions(device, settings),
    }


CLOCK = DeviceClock()
ROUNDS = 20
CPU = [
    Problem.mm(64, 96, 128, dtype=torch.float32, device_type="cpu"),
    Problem.addmm(32, 64, 128, dtype=torch.float32, device_type="cpu"),
    Problem.bmm(4, 32, 48, 64, dtype=torch.bfloat16, layout="nn", device_type="cpu"),
]
CUDA = [
    Problem.mm(16, 4096, 4096, dtype=torch.bfloat16, device_type="cuda"),
    Problem.mm(1024, 1024, 1024, dtype=torch.bfloat16, device_type="cuda"),
    Problem.addmm(512, 3072, 768, dtype=torch.float16, device_type="cuda"),
    Problem.bmm(32, 128, 128, 64, dtype=torch.bfloat16, layout="nn", device_type="cuda"),
]


def label(problem: Problem) -> str:
    return str(problem).split(" on ")[0].replace(" ", "-")


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("problem", [*CPU, *(pytest.param(p, marks=[pytest.mark.gpu, pytest.mark.alone]) for p in CUDA)], ids=label)
def test_record(benchmark: Any, problem: Problem, own_store: Path) -> None:
    device = detect(problem.device_type)
    with settings.patch(search="quick", backends=("aten", "triton") if device.type == "cuda" else None) as chosen:
        plan = plan_for(problem, -1 if device.type == "cpu" else device.index)
        benchmark.extra_info |= extra_info(problem, plan.choice, device, chosen)
    with conditions(problem, device), collection_paused():
        contender = Timer(problem, device, chosen.timing).contender(plan.choice, plan.kernel)
        last_us = benchmark.pedantic(CLOCK.sample, args=(contender,), rounds=ROUNDS, warmup_rounds=2)
    assert last_us > 0
    assert benchmark.extra_info["key"] == json.loads(problem.key)
    if benchmark.enabled:
        assert len(benchmark.stats.stats.data) == ROUNDS
        assert benchmark.stats.stats.max < 60


class Planned(Contender):
    """Takes 5 µs, then 7 µs, and so on."""

    rough_us = 5.0

    def __init__(self) -> None:
        self.count = 0

    def begin(self) -> None:
        self.count += 1

    def result_us(self) -> float:
        return 3.0 + 2 * self.count


def test_the_clock_goes_forward_by_the_time_of_a_call() -> None:
    clock, contender = DeviceClock(), Planned()
    assert clock() == 0
    assert clock.sample(contender) == 5
    assert clock() == clock() == pytest.approx(5e-6)
    assert clock.sample(contender) == 7
    assert clock() == pytest.approx(12e-6)


def test_extra_info_is_json_with_versions() -> None:
    device = detect("cpu")
    choice = subject_for(TORCH, CPU[2], device, settings.current())
    info = json.loads(json.dumps(extra_info(CPU[2], choice, device, settings.current())))
    assert info["problem"] == "bmm 4x32x48x64 bfloat16 nn on cpu"
    assert info["key"]["k"] == 64
    assert info["choice"] == "aten:bmm"
    assert info["versions"]["torch"] == torch.__version__
    assert info["versions"]["timing"] == "graph"
