"""How many processes it takes: one batch for all, a second one for what the first leaves open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..device import DeviceInfo
from ..settings import Settings
from ..timing.conditions import device_to_itself
from ..workers.worker import Worker, WorkerCrashed, WorkerTimedOut
from .sampling import Match, ProcessSample, Sampling, sample_match
from .statistics import Judgement, Verdict

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Failed:
    """A match that could not be measured, and why."""

    reason: str


Process = Callable[[Sequence[M], int], list[ProcessSample | Failed]]
"""``process(matches, turn)`` measures the matches in a fresh process, a result for each; ``turn`` counts the calls."""


@dataclass(slots=True)
class Series:
    """What was measured of one match: its batches of processes; or why it was not."""

    batches: list[list[ProcessSample]]
    failure: str = ""

    @property
    def samples(self) -> list[ProcessSample]:
        """What every process of every batch found."""
        return [sample for batch in self.batches for sample in batch]

    @property
    def values(self) -> list[list[float]]:
        """The log ratios, by batch."""
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
    """Measure in a batch of ``processes``, and in a second one those that ``judge(index, series)`` finds inconclusive (or all).

    ``whole`` asks for two batches of all. What fails in one process is left out of those that follow. ``tell`` is given a line for
    each process.
    """
    found = [Series([]) for _ in matches]
    for batch in (1, 2):
        open_ = [
            i
            for i, series in enumerate(found)
            if not series.failure and (batch == 1 or whole or judge(i, series).verdict is Verdict.INCONCLUSIVE)
        ]
        for i in open_:
            found[i].batches.append([])
        for number in range(processes):
            playing = [i for i in open_ if not found[i].failure]
            if not playing:
                break
            tell(f"batch {batch}, process {number + 1} of {processes}: {len(playing)} problem{'s' * (len(playing) > 1)}")
            turn = (batch - 1) * processes + number
            for i, result in zip(playing, process([matches[i] for i in playing], turn), strict=True):
                if isinstance(result, Failed):
                    found[i].failure = result.reason
                else:
                    found[i].batches[-1].append(result)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshProcess:
    """Measures matches in a process that is started for it and ended after it."""

    device: DeviceInfo
    settings: Settings
    sampling: Sampling

    def __call__(self, matches: Sequence[Match], turn: int) -> list[ProcessSample | Failed]:
        """A result for each match. One that kills the process costs only itself: the others go on in another process."""
        worker = Worker()
        results: list[ProcessSample | Failed] = []
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

    def _sample(self, worker: Worker, match: Match, turn: int, timeout_s: float) -> ProcessSample | Failed:
        arguments = (match, self.device, self.settings, self.sampling, turn)
        try:
            return worker.call(sample_match, *arguments, timeout_s=timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever a choice raises is told as the reason why it was not measured
            if self.device.type != "cpu" and worker.alive:
                worker.close()  # the error may have ruined the GPU context
            if isinstance(error, WorkerTimedOut):
                return Failed(f"{error.reason}; the limit follows the setting choice_timeout_s")
            return Failed(error.reason if isinstance(error, WorkerCrashed) else f"{type(error).__name__}: {error}")
