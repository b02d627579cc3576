"""Fresh processes, each of which measures a whole suite: memory lies elsewhere in each, and that is part of what is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..device import DeviceInfo
from ..settings import Settings
from ..timing.conditions import device_to_itself
from ..workers.worker import Worker, WorkerCrashed, WorkerTimedOut
from .sampling import Match, ProcessSample, Sampling, sample_match

__all__ = ["Failed", "FreshProcess", "reason_of"]


@dataclass(frozen=True, slots=True)
class Failed:
    """A match that could not be measured, and why."""

    reason: str


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
                worker.close()  # the error may have ruined the CUDA context
            return Failed(reason_of(error))


def reason_of(error: Exception) -> str:
    """An exception that came from a worker, in a line or a few."""
    if isinstance(error, WorkerTimedOut):
        return f"{error.reason}; the limit follows the setting choice_timeout_s"
    return error.reason if isinstance(error, WorkerCrashed) else f"{type(error).__name__}: {error}"
