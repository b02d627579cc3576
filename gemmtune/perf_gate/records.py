"""What pytest-benchmark is given to record: the time on the device as its clock, and what was measured as its ``extra_info``.

    clock = DeviceClock()

    @pytest.mark.benchmark(timer=clock)
    def test_mm(benchmark):
        ...
        benchmark.pedantic(clock.sample, args=(contender,), rounds=20)

It records; the gate judges: its comparisons pass where an id is missing, and know no noise from process to process.
"""

from __future__ import annotations

from typing import Any

from ..choice import Choice
from ..device import DeviceInfo
from ..problem import Problem
from ..settings import Settings
from ..timing.contenders import Contender
from ..version import __version__
from .gate import versions

__all__ = ["DeviceClock", "extra_info"]


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
