"""Collection of samples: a first batch of processes for all problems, a second one for those still undecided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..device import DeviceInfo
from ..selector.text_table import counted
from ..settings import Settings
from ..timing.timer import device_to_itself
from ..workers.worker import Worker, WorkerCrashed, WorkerTimedOut
from .sampling import Match, ProcessSample, Sampling, sample_match
from .statistics import Decision, Judgement

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
