"""Stand-ins for the tuning of a job, which worker processes import."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from gemmtune import Problem
from gemmtune.choice import Status
from gemmtune.device import preset
from gemmtune.errors import InvalidProblemError
from gemmtune.fleet.job import Job
from gemmtune.selector.result import Outcome, ProblemResult
from gemmtune.settings import Settings
from gemmtune.store.key import fingerprint_text
from gemmtune.store.store import Row, open_store

DEVICE = preset("portable")
"""Device of the stand-in seats."""
KILL, FAIL, SLOW, ONCE = 1001, 1002, 1003, 1004
"""K of a job that kills its process, raises, waits for a signal, or kills the first process."""


def jobs(count: int, k: int = 8) -> list[Job]:
    """Return jobs of different N."""
    return Job.alone(Problem.mm(16, n, k, device_type="cpu") for n in range(1, count + 1))


def row_of(job: Job, fingerprint: str, name: str) -> Row:
    return Row(
        key=job.problem.key, fingerprint=fingerprint, name=name, backend="aten", content_hash="0" * 8, status=Status.OK,
        time_us=5.0, baseline=True, finalist=True, info={"settled": "compared"},
    )  # fmt: skip


def result_of(job: Job, source: str = "measured") -> ProblemResult:
    outcome = Outcome(
        name="aten:mm", backend="aten", content_hash="0" * 8, status=Status.OK, time_us=5.0, baseline=True, finalist=True
    )
    return ProblemResult(
        problem=job.problem, outcomes=(outcome,), refusals=(), pick="aten:mm", limit_us=None, seconds=0.01, source=source
    )  # type: ignore[arg-type]


def pretend(job: Job, place: str, settings: Settings) -> ProblemResult:
    """Store a row of a job as a tuning does, or fail as its K says. A stored job is not measured again."""
    store, fingerprint, log = open_store(settings), fingerprint_text(DEVICE, settings.timing), settings.log_file
    if store.rows(job.problem.key, fingerprint):
        return result_of(job, "store")
    if log is not None:
        with Path(log).open("a") as file:
            file.write(f"{job.problem.n} {os.getpid()}\n")
    match job.problem.k:
        case k if k == FAIL:
            raise InvalidProblemError(f"no such product: N = {job.problem.n}")
        case k if k == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case k if k == ONCE and log is not None and Path(log).read_text().count(f"{job.problem.n} ") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case k if k == SLOW:
            try:
                threading.Event().wait(60)
            finally:  # as the tuning of a problem does at an interruption
                store.put([row_of(job, fingerprint, f"part {place}")])
        case _:
            time.sleep(0.002)
    store.put([row_of(job, fingerprint, place)])
    return result_of(job)
