"""Measurement in one process: candidate and reference in blocks of four samples, ABBA, and the median of the blocks' log ratios.

Within a block each contender runs once before and once after the other. Drifting clocks, and data that one leaves in a cache for
the other, thus cancel in the ratio. Blocks alternate in which contender comes first.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..choice import Choice, Kernel
from ..declaration.called import CalledChoice
from ..device import DeviceInfo
from ..errors import ErrorFromChoice
from ..problem import Problem
from ..selector.recheck import recheck_all
from ..selector.samples import Sample
from ..selector.text_table import counted
from ..selector.verify import random_expectation
from ..settings import Settings, use
from ..timing.contenders import CPU_US, Contender
from ..timing.timer import Timer, collection_paused, conditions, device_to_itself
from ..workers.worker import Worker, WorkerCrashed, WorkerTimedOut
from .statistics import Decision, Judgement

CPU_SAMPLE_US = 2000.0
"""Minimum length of a sample on a CPU. Other work of the system runs in slices of about a millisecond."""
MOST_REPEATS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Amount of measurement in one process: ``warm_up_s``, then blocks until ``budget_s``, but at least ``least_blocks``."""

    blocks: int = 30
    least_blocks: int = 10
    budget_s: float = 5.0
    warm_up_s: float = 0.3

    @classmethod
    def of(cls, device_type: str) -> "Sampling":
        """Return the sampling for a kind of device. Only a GPU has to warm up, to clocks that it sustains."""
        return cls(warm_up_s=0.1 if device_type == "cpu" else 0.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A comparison: the candidate and the reference for one problem."""

    problem: Problem
    candidate: Choice
    reference: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """Result of one process. ``log_ratio`` is the median over the blocks of log(candidate's time / reference's time)."""

    log_ratio: float
    candidate_us: float
    reference_us: float
    blocks: int


class Steady(Contender):
    """A contender whose sample is the median of several short ones, which together last long enough."""

    def __init__(self, contender: Contender, least_us: float, batch_us: float) -> None:
        self._contender = contender
        self._repeats = max(1, min(math.ceil(least_us / max(contender.rough_us, batch_us)), MOST_REPEATS))
        self._times_us: list[float] = []
        self.rough_us = contender.rough_us

    def begin(self) -> None:
        self._times_us = [self._contender.sample_us() for _ in range(self._repeats)]

    def result_us(self) -> float:
        return statistics.median(self._times_us)


def sample_match(match: Match, device: DeviceInfo, settings: Settings, sampling: Sampling, turn: int) -> ProcessSample:
    """Measure a match in this process, number ``turn``; odd ones prepare and measure the reference first. Choices may raise."""
    with use(settings), conditions(match.problem, device), collection_paused():
        timer = Timer(match.problem, device, settings.timing)
        choices = {"candidate": match.candidate, "reference": match.reference}
        order = list(choices)[:: -1 if turn % 2 else 1]
        kernels = {role: choices[role].build() for role in order}
        made: dict[str, Contender] = {role: timer.contender(choices[role], kernels[role]) for role in order}
        for contender in made.values():
            contender.sample_us()  # captures a graph on a GPU
        if device.type == "cpu":
            made = {role: Steady(contender, CPU_SAMPLE_US, CPU_US) for role, contender in made.items()}
        sample = compare(made["candidate"], made["reference"], sampling, turn=turn)
        if turn == 0:
            _check(match.candidate, kernels["candidate"], timer, device)
        return sample


def _check(choice: Choice, kernel: Kernel, timer: Timer, device: DeviceInfo) -> None:
    """Raise ErrorFromChoice if the candidate is wrong with other values in the memory of the timing.

    A time of results that were kept from earlier calls says nothing. A function is held to the arithmetic that it declares.
    """
    if isinstance(choice, CalledChoice):
        choice = dataclasses.replace(choice, claims=choice.load().traits.claims(choice.problem))
    expectation = random_expectation(choice.problem, device.torch_device)
    for failure in recheck_all([choice], lambda c: [timer.call(c, kernel)], timer, expectation).values():
        reason = failure.reason if isinstance(failure, Sample) else f"{type(failure).__name__}: {failure}"
        raise ErrorFromChoice(choice.name, str(choice.problem), f"is wrong {reason}")


def compare(candidate: Contender, reference: Contender, sampling: Sampling, *, turn: int = 0) -> ProcessSample:
    """Measure blocks of candidate and reference: ABBA, BAAB, ABBA, … if ``turn`` is even, else starting with BAAB."""

    def pair(first: Contender, second: Contender) -> tuple[float, float]:
        # Begin both before waiting for the first: a GPU that idles in between changes its clocks.
        first.begin()
        second.begin()
        return first.result_us(), second.result_us()

    def block(reference_first: bool) -> tuple[list[float], list[float]]:
        first, second = (reference, candidate) if reference_first else (candidate, reference)
        one, two = pair(first, second)
        three, four = pair(second, first)
        return ([two, three], [one, four]) if reference_first else ([one, four], [two, three])

    return in_blocks(block, sampling, turn)


def in_blocks(block: Callable[[bool], tuple[list[float], list[float]]], sampling: Sampling, turn: int) -> ProcessSample:
    """Measure blocks. ``block(reference_first)`` returns two times of the candidate and two of the reference, in µs."""
    # Warm up.
    numbers = itertools.count(turn)
    begun = time.perf_counter()
    while time.perf_counter() - begun < sampling.warm_up_s:
        block(next(numbers) % 2 == 1)
    # Measure.
    log_ratios: list[float] = []
    candidate_us: list[float] = []
    reference_us: list[float] = []
    begun = time.perf_counter()
    while len(log_ratios) < sampling.blocks:
        if len(log_ratios) >= sampling.least_blocks and time.perf_counter() - begun > sampling.budget_s:
            break
        candidate, reference = block((turn + len(log_ratios)) % 2 == 1)
        log_ratios.append((math.log(math.prod(candidate)) - math.log(math.prod(reference))) / 2)
        candidate_us += candidate
        reference_us += reference
    return ProcessSample(
        log_ratio=statistics.median(log_ratios),
        candidate_us=statistics.median(candidate_us),
        reference_us=statistics.median(reference_us),
        blocks=len(log_ratios),
    )


M = TypeVar("M")


Process = Callable[[Sequence[M], int], list[ProcessSample | str]]
"""Function ``process(matches, turn)`` that returns each match's sample from a fresh process, or why it has none."""


@dataclass(slots=True)
class Series:
    """Samples of one match, in batches of processes, or the reason for having none."""

    batches: list[list[ProcessSample]]
    failure: str = ""

    @property
    def samples(self) -> list[ProcessSample]:
        """Samples of all processes."""
        return [sample for batch in self.batches for sample in batch]

    @property
    def values(self) -> list[list[float]]:
        """Log ratios by batch."""
        return [[sample.log_ratio for sample in batch] for batch in self.batches]


def collect(
    matches: Sequence[M],
    process: Process[M],
    judge: Callable[[int, Series], Judgement],
    *,
    processes: int,
    whole: bool,
    tell: Callable[[str], None],
) -> list[Series]:
    """Measure every match in a batch of ``processes``, and the inconclusive ones in a second batch.

    ``judge(index, series)`` decides after the first batch. ``whole`` requests two batches for all. A match that fails in one
    process is left out of later ones. ``tell`` gets a line for each process.
    """
    found = [Series([]) for _ in matches]
    for batch in (1, 2):
        open_ = [
            i
            for i, series in enumerate(found)
            if not series.failure and (batch == 1 or whole or judge(i, series).decision is Decision.INCONCLUSIVE)
        ]
        for i in open_:
            found[i].batches.append([])
        for number in range(processes):
            remaining = [i for i in open_ if not found[i].failure]
            if not remaining:
                break
            tell(f"batch {batch}, process {number + 1} of {processes}: {counted(len(remaining), 'problem')}")
            turn = (batch - 1) * processes + number
            for i, result in zip(remaining, process([matches[i] for i in remaining], turn), strict=True):
                if isinstance(result, str):
                    found[i].failure = result
                else:
                    found[i].batches[-1].append(result)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshProcess:
    """Measurement in a new process, which ends afterwards."""

    device: DeviceInfo
    settings: Settings
    sampling: Sampling

    def __call__(self, matches: Sequence[Match], turn: int) -> list[ProcessSample | str]:
        """Return a result for each match. A match that kills the process fails, and the others continue in another process."""
        worker = Worker()
        results: list[ProcessSample | str] = []
        timeout_s = self.settings.choice_timeout_s + self.sampling.budget_s
        try:
            for match in matches:
                if not worker.alive:
                    worker = Worker()
                with device_to_itself(self.settings, self.device):
                    results.append(self._sample(worker, match, turn, timeout_s))
        finally:
            worker.close()
        return results

    def _sample(self, worker: Worker, match: Match, turn: int, timeout_s: float) -> ProcessSample | str:
        arguments = (match, self.device, self.settings, self.sampling, turn)
        try:
            return worker.call(sample_match, *arguments, timeout_s=timeout_s)
        except Exception as error:  # noqa: BLE001 - any error of a choice is reported as the reason for not measuring it
            if self.device.type != "cpu" and worker.alive:
                worker.close()  # the error may have broken the CUDA context
            if isinstance(error, WorkerTimedOut):
                return f"{error.reason}; the limit follows the setting choice_timeout_s"
            return error.reason if isinstance(error, WorkerCrashed) else f"{type(error).__name__}: {error}"
