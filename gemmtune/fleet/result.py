"""Result of a fleet: what came of each task, and the devices that took part."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from ..errors import FleetError
from ..selector.result import ProblemResult
from ..selector.table import pick_line
from ..selector.text_table import counted
from .dealer import Task
from .job import Job, JobResult
from .seat import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """One task with its result, or with the reason of its failure."""

    task: Task
    seat: str
    seconds: float
    result: JobResult | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        job = self.task.job
        return {
            "job": str(job),
            "problem": job.problem.to_json(),
            "rows": None if job.rows is None else [job.rows[0], job.rows[-1]],
            "seat": self.seat,
            "seconds": self.seconds,
            "failed": self.reason,
            "result": "" if self.result is None else summary(self.result),
            "source": None if self.result is None else self.result.source,
        }


@dataclass(slots=True)
class FleetResult:
    """Everything that a fleet has done. ``disagreements`` are the devices that are slower than their equals."""

    done: list[Done] = field(default_factory=list)
    devices: dict[str, Device] = field(default_factory=dict)
    disagreements: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    """Reasons of the seats that left, by name."""
    dealt_again: int = 0
    seconds: float = 0.0

    @property
    def failures(self) -> list[Done]:
        return [one for one in self.done if one.result is None]

    def results(self, job: Job) -> list[JobResult]:
        """Return the results of a job, one for each kind of device."""
        return [one.result for one in self.done if one.task.job == job and one.result is not None]

    def refuse_failures(self) -> None:
        """Raise FleetError if tasks failed."""
        if self.failures:
            raise FleetError([(str(one.task.job), one.reason) for one in self.failures])

    @property
    def measured(self) -> int:
        """Number of tasks with new measurements."""
        return sum(one.result is not None and one.result.source == "measured" for one in self.done)

    def to_json(self) -> dict[str, Any]:
        """Return plain values of everything."""
        return {
            "seconds": self.seconds,
            "measured": self.measured,
            "dealt_again": self.dealt_again,
            "devices": {name: json.loads(x.fingerprint) | {"limits": dict(x.limits)} for name, x in self.devices.items()},
            "disagreements": self.disagreements,
            "left": self.left,
            "jobs": [one.to_json() for one in self.done],
        }


def summary(result: JobResult) -> str:
    """Return a result in a line."""
    stored = "from the store, " if result.source == "store" else ""
    if isinstance(result, ProblemResult):
        return f"{stored}{pick_line(result)}"
    return f"{stored}{counted(len(result.table.segments), 'segment')} of M = {result.table.lo}..{result.table.hi}"


def without_details(result: JobResult) -> JobResult:
    """Return a result without what only its own display needs."""
    if isinstance(result, ProblemResult):
        kept = tuple(dict.fromkeys(o for o in (result.picked, result.baseline) if o is not None))
        return dataclasses.replace(result, outcomes=kept, refusals=())
    return dataclasses.replace(result, tuned_results=(), times={})


def duration(seconds: float) -> str:
    """Return a duration for reading, such as ``12 s``, ``3 min`` or ``2.5 h``."""
    if seconds < 100:
        return f"{seconds:.{0 if seconds >= 10 else 1}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
