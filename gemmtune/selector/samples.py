"""Measurements of tried choices: samples, times of final rounds, typed failures, and the short measurement that drops losers."""

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..choice import Status
from ..errors import CompileError
from ..timing.contenders import Contender
from ..timing.rounds import Ranked

HOPELESS = 1.5
"""Factor over the best time at which a choice is dropped after its first calls, without a graph (TunableOp's factor)."""
SLOWER = 1.15
"""Factor over the best time at which a choice is dropped after a few samples. Both factors far exceed the noise of so few."""
LAUNCH_US = 100.0
"""Maximum launch time that a choice adds to a single GPU call. An eager epilogue has several launches."""
FEW_SAMPLES = 3
MORE_SAMPLES = 12
NO_MEMORY = ("MemoryError: ", "DefaultCPUAllocator: can't allocate memory")
"""Messages of memory shortage: Python's, which torch's OutOfMemoryError for a GPU also contains, and torch's for a CPU."""
STAGE_S = 0.04
"""Time limit in s for one stage of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The result of one trial. A short measurement's ``time_us`` can drop losers but not rank the best."""

    status: Status
    time_us: float | None = None
    error_over_bound: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Times of the final rounds by choice, the choices that failed, and, except in short rounds, what a ``Watch`` has ``seen``."""

    times: Mapping[str, Ranked]
    seen: str = ""
    failures: Mapping[str, Sample] = field(default_factory=dict)


def failure_of(error: Exception) -> tuple[Status, str]:
    """Return the status and a short reason for an exception from building or running a choice."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, CompileError):
        return Status.COMPILE_ERROR, error.output
    # Triton's exception is recognized by name, because its module exists only if Triton is installed.
    if any(words in text for words in NO_MEMORY) or type(error).__name__ == "OutOfResources":
        return Status.OUT_OF_RESOURCES, text
    return Status.RUNTIME_ERROR, text


def short_measurement(contender: Contender, best_us: float | None) -> float:
    """Return the time of a call in µs, from as few samples as suffice to see that the choice is slower than ``best_us``."""
    # The minimum of a few samples decides a rejection: disturbances only ever lengthen a measurement.
    hopeless = best_us is not None and contender.rough_us > HOPELESS * best_us + LAUNCH_US
    if hopeless and contender.takes_capture:
        return contender.rough_us
    samples = samples_of(contender, FEW_SAMPLES)
    if best_us is None or min(samples) <= SLOWER * best_us:
        samples += samples_of(contender, MORE_SAMPLES)
    # On a CPU, other processes lengthen most samples, so the minimum counts. GPU samples vary with the clocks.
    return statistics.median(samples) if contender.takes_capture else min(samples)


def samples_of(contender: Contender, most: int) -> list[float]:
    begun = time.perf_counter()
    samples = [contender.sample_us()]
    while len(samples) < most and time.perf_counter() - begun < STAGE_S:
        samples.append(contender.sample_us())
    return samples


def scaled_first_samples(times: Mapping[str, Ranked], first_us: Mapping[str, float], slower: Iterable[str]) -> dict[str, Ranked]:
    """Return times for choices that skipped the rounds: their first samples, scaled by that of the fastest."""
    if not times:
        return {}
    fastest = min(times, key=lambda name: times[name].time_us)
    scaled = {name: first_us[name] / first_us[fastest] * times[fastest].time_us for name in slower}
    return {name: Ranked(time_us=time_us, margin_us=time_us) for name, time_us in scaled.items()}
