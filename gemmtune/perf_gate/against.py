"""Another commit's installation as the anchor: a process with each, sampled in turn."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import settings as settings_module
from ..device import DeviceInfo
from ..errors import GateError
from ..problem import Problem
from ..settings import Settings
from ..timing.conditions import device_to_itself
from ..workers.worker import Elsewhere, Worker
from . import guest
from .processes import Failed, reason_of
from .sampling import ProcessSample, Sampling, in_blocks

__all__ = ["Installation", "PairOfProcesses"]

TUNING_TIMEOUT_S = 1800.0
"""For one problem, which the other installation tunes when it sees it for the first time."""
PAUSE_S = 0.004
"""Between a sample in one process and the next in the other: threads of the first spin for a while before they sleep."""
NAME = "conformance.perf.guest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Another gemmtune: ``path`` has its package folder. Its measurements are kept apart from those of this one."""

    path: str
    version: str

    @classmethod
    def at(cls, path: str) -> Installation:
        """The installation in a checkout or a site-packages folder.

        Raises:
            GateError: there is none, or it cannot be imported.
        """
        folder = Path(path).resolve()
        if not (folder / "gemmtune" / "__init__.py").is_file():
            raise GateError(
                f"against: got {path!r}, which has no gemmtune/__init__.py; expected a checkout or a site-packages folder"
            )
        worker = Worker(gpu=False, installation=str(folder))
        try:
            version, file = worker.call(Elsewhere(f"{NAME}:introduce"), timeout_s=60)
        except Exception as error:
            raise GateError(f"against: the gemmtune in {path} cannot be used: {reason_of(error)}") from error
        finally:
            worker.close()
        if folder not in Path(file).resolve().parents:
            raise GateError(f"against: got {path!r}, but what is imported from there as gemmtune is {file}")
        return cls(path=str(folder), version=version)

    def changes(self, settings: Settings) -> dict[str, Any]:
        """The settings in force as changes for that installation, whose store and compiled kernels have a folder of their own."""
        own = settings.folder / "against" / hashlib.sha256(self.path.encode()).hexdigest()[:16]
        return _changed(settings) | {"cache_dir": str(own), "store_path": None, "tune": "on_miss"}

    def picks(self, problems: Sequence[Problem], device: DeviceInfo, settings: Settings) -> list[str | Failed]:
        """What it runs for each problem, tuned now where it does not know."""
        worker = Worker(installation=self.path)
        found: list[str | Failed] = []
        arguments = (str(device.torch_device), self.changes(settings))
        try:
            for problem in problems:
                if not worker.alive:
                    worker = Worker(installation=self.path)
                try:
                    found.append(
                        worker.call(Elsewhere(f"{NAME}:prepare"), problem.to_json(), *arguments, timeout_s=TUNING_TIMEOUT_S)
                    )
                except Exception as error:  # noqa: BLE001 - whatever happens there is told as the reason
                    found.append(Failed(f"{self.path}: {reason_of(error)}"))
        finally:
            worker.close()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOfProcesses:
    """Measures problems in two fresh processes, one with each installation; one of them works at a time."""

    installation: Installation
    device: DeviceInfo
    settings: Settings
    sampling: Sampling

    def __call__(self, problems: Sequence[Problem], turn: int) -> list[ProcessSample | Failed]:
        """A result for each problem; the candidate is this installation."""
        results: list[ProcessSample | Failed] = []
        sides: tuple[_Side, _Side] | None = None
        try:
            for problem in problems:
                sides = sides or self._sides()
                try:
                    results.append(self._sample(problem, *sides, turn))
                except _SideError as error:
                    results.append(Failed(str(error)))
                    _close(sides)
                    sides = None
        finally:
            _close(sides)
        return results

    def _sides(self) -> tuple[_Side, _Side]:
        ours = _Side("this installation", Worker(), _changed(self.settings), self, elsewhere=False)
        theirs = Worker(installation=self.installation.path)
        return ours, _Side(self.installation.path, theirs, self.installation.changes(self.settings), self, elsewhere=True)

    def _sample(self, problem: Problem, ours: _Side, theirs: _Side, turn: int) -> ProcessSample:
        def block(anchor_first: bool) -> tuple[list[float], list[float]]:
            first, second = (theirs, ours) if anchor_first else (ours, theirs)
            outer, inner = [first.sample_us()], [second.sample_us(), second.sample_us()]
            outer.append(first.sample_us())
            return (inner, outer) if anchor_first else (outer, inner)

        with device_to_itself(self.settings, self.device):
            for side in (theirs, ours) if turn % 2 else (ours, theirs):
                side.begin(problem)
            return in_blocks(block, self.sampling, turn)


class _SideError(Exception):
    """One of the two processes failed; the text says which and why."""


class _Side:
    """One installation in its process."""

    def __init__(self, name: str, worker: Worker, changes: dict[str, Any], pair: PairOfProcesses, *, elsewhere: bool) -> None:
        self._name = name
        self._changes = changes
        self._pair = pair
        self._elsewhere = elsewhere
        self.worker = worker

    def begin(self, problem: Problem) -> None:
        """Make the pick for a problem ready."""
        device = str(self._pair.device.torch_device)
        self._call("begin", problem.to_json(), device, self._changes, self._pair.settings.timing)

    def sample_us(self) -> float:
        """One sample."""
        time.sleep(PAUSE_S)
        return float(self._call("sample_us"))

    def _call(self, function: str, *arguments: object) -> Any:
        job = Elsewhere(f"{NAME}:{function}") if self._elsewhere else getattr(guest, function)
        try:
            return self.worker.call(job, *arguments, timeout_s=self._pair.settings.choice_timeout_s)
        except Exception as error:
            raise _SideError(f"{self._name}: {reason_of(error)}") from error


def _close(sides: tuple[_Side, _Side] | None) -> None:
    for side in sides or ():
        side.worker.close()


def _changed(settings: Settings) -> dict[str, Any]:
    """The fields in which settings differ from those that a fresh process has by its environment."""
    usual = settings_module.from_environment()
    names = [field.name for field in dataclasses.fields(settings)]
    return {name: getattr(settings, name) for name in names if getattr(settings, name) != getattr(usual, name)}
