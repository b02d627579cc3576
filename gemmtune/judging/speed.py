"""Speed of an untrusted GEMM: its ratio to torch over the drawn shapes, and the hardware's limit."""

import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..device import DeviceInfo, detect
from ..timing.limits import Limits, measure_limits
from ..timing.neighbours import Watch
from ..untrusted.candidate import Candidate
from ..untrusted.conduct import Conduct
from ..untrusted.shape import Shape

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
    added_us: tuple[float, float] = (0.0, 0.0)
    """Time that the judge adds to a call on a GPU, which is taken off the others, with half its 95% interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed over all timed shapes. ``low`` and ``high`` are the 95% interval of the mean ratio over shapes such as these."""

    shapes: tuple[Timed, ...]
    ratio: float
    low: float
    high: float


def judge_speed(candidate: Candidate, shapes: Sequence[Shape], busy: str = "") -> Speed | None:
    """Return the speed, or None if no shape was timed. Note times that are below the hardware's limit.

    ``busy`` describes other work on the machine, which makes limits uncertain.
    """
    device = detect(str(candidate.device))
    timed = [(shape, found, shape.time_s) for shape in shapes if (found := shape.ratio) is not None and shape.time_s is not None]
    if not timed:
        return None
    rows = []
    for shape, (middle, half), time_s in timed:
        time_us, label = (time_s or 0.0) * 1e6, shape.problem.dtype_label
        limits = _known(_limits(device, label), busy)
        if _least_us(limits, shape, device, time_us) is not None:  # something else may have run while they were measured
            limits = _known(_higher(limits, _measured(device, label)), busy)
        limit_us = limits.us(shape.problem, device)
        if (least_us := _least_us(limits, shape, device, time_us)) is not None:
            candidate.note(Conduct.TOO_FAST, f"{shape.problem} in {time_us:.1f} µs; this machine needs at least {least_us:.1f} µs")
        low, high = math.exp(middle - half), math.exp(middle + half)
        share = limit_us / time_us if limit_us and time_us else None
        added_us = (shape.added_s[0] * 1e6, shape.added_s[1] * 1e6)
        numbers: dict[str, float] = {"time_us": time_us, "ratio": math.exp(middle), "low": low, "high": high}
        rows.append(Timed(problem=str(shape.problem), of_limit=share, added_us=added_us, **numbers))
    middle, half = _mean([found for _, found, _ in timed])
    return Speed(shapes=tuple(rows), ratio=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half))


def _least_us(limits: Limits, shape: Shape, device: DeviceInfo, time_us: float) -> float | None:
    """Return the least time of a shape if the given one is below it."""
    least_us = limits.least_us(shape.problem, device)
    return least_us if least_us is not None and time_us < least_us else None


def _known(limits: Limits, busy: str) -> Limits:
    return Limits(values=limits.values, disturbed=frozenset(limits.values)) if busy else limits


def _higher(one: Limits, other: Limits) -> Limits:
    values = {name: max(value, other.values[name]) for name, value in one.values.items()}
    return Limits(values=values, disturbed=one.disturbed | other.disturbed)


@functools.cache
def _limits(device: DeviceInfo, label: str) -> Limits:
    return _measured(device, label)


def _measured(device: DeviceInfo, label: str) -> Limits:
    """Measure the limits with all cores of this process, which a GEMM may use too."""
    threads, watch = torch.get_num_threads(), Watch(device)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    try:
        values = measure_limits(dataclasses.replace(device, threads=cores) if device.type == "cpu" else device, label)
    finally:
        torch.set_num_threads(threads)
    return Limits(values=values, disturbed=frozenset(values) if watch.seen() else frozenset())


def _mean(logs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of logarithms, given with their margins, and half its interval, which has the spread of shapes too."""
    middle = statistics.fmean(value for value, _ in logs)
    own = math.sqrt(sum(half**2 for _, half in logs)) / len(logs)
    if len(logs) < 2:
        return middle, own
    t = STUDENT[min(len(logs) - 2, len(STUDENT) - 1)]
    return middle, max(own, t * statistics.stdev(value for value, _ in logs) / math.sqrt(len(logs)))
