"""Speed of an untrusted GEMM: its ratio to torch over the drawn shapes, and the hardware's limit."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..device import DeviceInfo, detect
from ..timing.limits import Limits, measure_limits
from ..untrusted.candidate import Candidate
from ..untrusted.conduct import Conduct
from ..untrusted.trial import Shape

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t of a two-sided 95% interval, from one degree of freedom on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Speed for one shape."""

    problem: str
    time_us: float
    ratio: float
    """Time of torch over that of the GEMM: above 1 it is faster than torch."""
    low: float
    high: float
    of_limit: float | None
    """Share of the hardware's limit that it reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed over all timed shapes. ``low`` and ``high`` are the 95% interval of the mean ratio over shapes such as these."""

    shapes: tuple[Timed, ...]
    ratio: float
    low: float
    high: float


def judge_speed(candidate: Candidate, shapes: Sequence[Shape]) -> Speed | None:
    """Return the speed, or None if no shape was timed. Note times that are below the hardware's limit."""
    device = detect(str(candidate.device))
    timed = [(shape, found, shape.time_s) for shape in shapes if (found := shape.ratio) is not None and shape.time_s is not None]
    if not timed:
        return None
    rows = []
    for shape, (middle, half), time_s in timed:
        limits = _limits(device, shape.problem.dtype_label)
        least_us, limit_us = limits.least_us(shape.problem, device), limits.us(shape.problem, device)
        time_us = (time_s or 0.0) * 1e6
        if least_us is not None and time_us < least_us:
            candidate.note(Conduct.TOO_FAST, f"{shape.problem} in {time_us:.1f} µs; this machine needs at least {least_us:.1f} µs")
        low, high = math.exp(middle - half), math.exp(middle + half)
        share = limit_us / time_us if limit_us and time_us else None
        rows.append(Timed(problem=str(shape.problem), time_us=time_us, ratio=math.exp(middle), low=low, high=high, of_limit=share))
    middle, half = _mean([found for _, found, _ in timed])
    return Speed(shapes=tuple(rows), ratio=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half))


@functools.cache
def _limits(device: DeviceInfo, label: str) -> Limits:
    known: Mapping[str, float] = measure_limits(device, label)
    return Limits(values=known)


def _mean(logs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of logarithms, given with their margins, and half its interval, which has the spread of shapes too."""
    middle = statistics.fmean(value for value, _ in logs)
    own = math.sqrt(sum(half**2 for _, half in logs)) / len(logs)
    if len(logs) < 2:
        return middle, own
    t = STUDENT[min(len(logs) - 2, len(STUDENT) - 1)]
    return middle, max(own, t * statistics.stdev(value for value, _ in logs) / math.sqrt(len(logs)))
