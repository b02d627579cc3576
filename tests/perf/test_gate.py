"""The gate's rule finds slow-downs and raises no false alarms, on simulated noise and on loops of known length."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmtune.device import preset
from gemmtune.perf_gate.sampling import Match, Sampling, Steady, compare, in_blocks, sample_match
from gemmtune.perf_gate.statistics import Decision, Rule
from gemmtune.perf_gate.subjects import TORCH, subject_for
from gemmtune.problem import Problem
from gemmtune.settings import Settings
from gemmtune.timing.contenders import CpuContender

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SUITE = 20
SAMPLING = Sampling(warm_up_s=0.02)


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module that simulates noise."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gate_simulation")


@pytest.mark.parametrize("baseline", [False, True], ids=["torch", "baseline"])
@pytest.mark.parametrize("process_noise", [0.005, 0.01])
class TestOperatingPoint:
    @pytest.mark.rotates(8)
    def test_no_false_alarm_in_100_suites(self, simulation: Any, process_noise: float, baseline: bool) -> None:
        noise = simulation.Noise(process=process_noise)
        found = simulation.decisions([0.0] * 100 * SUITE, noise, Rule.for_suite(SUITE), 1, baseline=baseline)
        assert found.count(Decision.REGRESSED) == 0
        assert found.count(Decision.PASS) >= 0.99 * len(found)

    def test_a_slow_down_of_5_percent_is_found(self, simulation: Any, process_noise: float, baseline: bool) -> None:
        noise = simulation.Noise(process=process_noise)
        found = simulation.decisions([math.log(1.05)] * 400, noise, Rule.for_suite(SUITE), 2, baseline=baseline)
        assert found.count(Decision.REGRESSED) >= 0.95 * len(found)
        assert found.count(Decision.PASS) == 0


def test_a_speed_up_of_5_percent_is_an_improvement(simulation: Any) -> None:
    found = simulation.decisions([-math.log(1.05)] * 200, simulation.Noise(process=0.005), Rule.for_suite(SUITE), 3, baseline=False)
    assert found.count(Decision.IMPROVED) >= 0.95 * len(found)


def test_noise_that_hides_5_percent_is_inconclusive(simulation: Any) -> None:
    found = simulation.decisions([math.log(1.05)] * 300, simulation.Noise(process=0.1), Rule.for_suite(SUITE), 4, baseline=False)
    assert found.count(Decision.INCONCLUSIVE) >= 0.95 * len(found)


def busy(seconds: float) -> Callable[[], None]:
    """Return work of a fixed wall-clock length, independent of the machine's load."""

    def work() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return work


@pytest.mark.parametrize("percent", [0, 5, -5])
@pytest.mark.parametrize("turn", [0, 1])
def test_a_planted_difference_between_loops_is_measured(percent: int, turn: int) -> None:
    candidate, reference = (CpuContender([busy(us * 1e-6)]) for us in (200 + 2 * percent, 200))
    sample = compare(candidate, reference, SAMPLING, turn=turn)
    assert sample.log_ratio == pytest.approx(math.log1p(percent / 100), abs=0.01)
    assert sample.reference_us == pytest.approx(200, rel=0.1)


def test_blocks_cancel_drift_and_order_effects() -> None:
    """Check blocks with falling clocks, where the second contender of a pair is 3% faster."""
    order = ""

    def block(reference_first: bool) -> tuple[list[float], list[float]]:
        nonlocal order
        order += "BAAB " if reference_first else "ABBA "
        drift = [1 + 0.01 * (len(order) // 5 * 4 + i) for i in range(4)]
        late = [1, 0.97, 1, 0.97]
        times = [100 * d * x for d, x in zip(drift, late, strict=True)]
        outer, inner = [times[0], times[3]], [times[1], times[2]]
        return (inner, [1.05 * t for t in outer]) if reference_first else (outer, [1.05 * t for t in inner])

    sample = in_blocks(block, Sampling(blocks=6, warm_up_s=0), 1)
    assert order == "BAAB ABBA BAAB ABBA BAAB ABBA "
    assert sample.log_ratio == pytest.approx(-math.log(1.05), abs=1e-4)


def test_blocks_end_early_for_long_kernels() -> None:
    candidate, reference = (CpuContender([busy(0.005)]) for _ in range(2))
    sample = compare(candidate, reference, Sampling(least_blocks=4, budget_s=0.05, warm_up_s=0))
    assert sample.blocks == 4


def test_steady_samples_last_long_enough_and_remove_outliers() -> None:
    times = iter([100.0, 100.0, 900.0, 100.0, 300.0, 100.0, 100.0])

    class Planned(CpuContender):
        """Contender with times from the list."""

        rough_us = 400.0

        def __init__(self) -> None:
            self.count = 0

        def begin(self) -> None:
            self.count += 1

        def result_us(self) -> float:
            return next(times)

    contender = Planned()
    assert Steady(contender, 2000, 200).sample_us() == 100
    assert contender.count == 5


def test_sample_match_times_choices() -> None:
    problem, device, settings = Problem.mm(48, 64, 96, dtype=torch.float32, device_type="cpu"), preset("portable"), Settings()
    choice = subject_for(TORCH, problem, device, settings)
    sample = sample_match(Match(problem=problem, candidate=choice, reference=choice), device, settings, SAMPLING, 1)
    assert SAMPLING.least_blocks <= sample.blocks <= SAMPLING.blocks
    assert min(sample.candidate_us, sample.reference_us) > 0.1
