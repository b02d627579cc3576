"""How choices fare that are tried: samples, times of final rounds, typed failures, and the short measurement that drops losers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..choice import Status
from ..errors import CompileError
from ..timing.contenders import Contender
from ..timing.rounds import Ranked

HOPELESS = 1.5
"""A choice that is slower than the best by this factor after the first calls is not worth a graph (TunableOp's factor) …"""
SLOWER = 1.15
"""… and by this one after a few samples. Both lie far outside of what the noise of so few samples can mistake."""
LAUNCH_US = 100.0
"""What the launches of a choice (with an eager epilogue there are several) add at most to a single call on a GPU."""
FEW_SAMPLES = 3
MORE_SAMPLES = 12
NO_MEMORY = ("MemoryError: ", "DefaultCPUAllocator: can't allocate memory")
"""What is said where memory is short: by Python and by torch of a GPU (OutOfMemoryError), and by torch of a CPU."""
STAGE_S = 0.04
"""A stage of samples ends after this time, however few they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How one choice fared. ``time_us`` is from a short measurement: good enough to drop losers, not to rank the best."""

    status: Status
    time_us: float | None = None
    error_over_bound: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The times of the final rounds by the name of the choice, what a ``Watch`` saw of other processes during the session (it is
    not asked after short rounds, which take no longer than that), and how choices fared that failed in the rounds."""

    times: Mapping[str, Ranked]
    seen: str = ""
    failures: Mapping[str, Sample] = field(default_factory=dict)


def failure_of(error: Exception) -> tuple[Status, str]:
    """The typed status of an exception that came from building or running a choice, and its reason in one line or a few."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, CompileError):
        return Status.COMPILE_ERROR, error.output
    # Triton's class is known by its name: its module is only there when Triton is.
    if any(words in text for words in NO_MEMORY) or type(error).__name__ == "OutOfResources":
        return Status.OUT_OF_RESOURCES, text
    return Status.RUNTIME_ERROR, text


def short_measurement(contender: Contender, best_us: float | None) -> float:
    """The time of a call in µs, from as few samples as it takes to see that the choice is slower than ``best_us``."""
    # Rejection goes by the least of a few: what disturbs a measurement only ever makes it longer.
    hopeless = best_us is not None and contender.rough_us > HOPELESS * best_us + LAUNCH_US
    if hopeless and contender.takes_capture:
        return contender.rough_us
    samples = samples_of(contender, FEW_SAMPLES)
    if best_us is None or min(samples) <= SLOWER * best_us:
        samples += samples_of(contender, MORE_SAMPLES)
    # Beside other processes most samples of a CPU are too long; those of a GPU differ by its clocks.
    return statistics.median(samples) if contender.takes_capture else min(samples)


def samples_of(contender: Contender, most: int) -> list[float]:
    begun = time.perf_counter()
    samples = [contender.sample_us()]
    while len(samples) < most and time.perf_counter() - begun < STAGE_S:
        samples.append(contender.sample_us())
    return samples
