"""Stand-ins for the tuning of a job, which worker processes import."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from pathlib import Path

from gemmtune import Problem
from gemmtune.choice import Status
from gemmtune.device import DeviceInfo, detect
from gemmtune.errors import InvalidProblemError
from gemmtune.fleet.job import Job
from gemmtune.selector.result import Outcome, ProblemResult
from gemmtune.settings import Settings
from gemmtune.store.key import fingerprint_text
from gemmtune.store.store import Row, open_store

DEVICE = detect("cpu")
"""Device of the stand-in seats."""
KILL, FAIL, SLOW, ONCE, WAITS_ONCE = 1001, 1002, 1003, 1004, 1005
"""K of a job that kills its process, raises, waits for a signal, kills the first process, or waits in the first process."""
WAITING = 12
"""N of the job that waits in the first process."""
FAILS_TO_COMPILE = 3
KERNEL = "pretended/kernel.so"


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
    store, fingerprint, log = open_store(settings), fingerprint_text(detect(place), settings.timing), settings.log_file
    name = f"{job.problem.n}x{job.problem.k}"
    if store.rows(job.problem.key, fingerprint):
        return result_of(job, "store")
    if log is not None:
        with Path(log).open("a") as file:
            file.write(f"{name} {os.getpid()}\n")
    match job.problem.k:
        case k if k == FAIL:
            warnings.warn("it will fail", RuntimeWarning, stacklevel=1)
            raise InvalidProblemError(f"no such product: N = {job.problem.n}")
        case k if k == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case k if k == ONCE and log is not None and Path(log).read_text().count(f"{name} ") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case k if k == WAITS_ONCE and job.problem.n == WAITING and log and Path(log).read_text().count(f"{name} ") == 1:
            threading.Event().wait(60)
        case k if k == SLOW:
            try:
                threading.Event().wait(60)
            finally:  # as the tuning of a problem does at an interruption
                store.put([row_of(job, fingerprint, f"part {place}")])
        case _:
            time.sleep(0.002)
    store.put([row_of(job, fingerprint, place)])
    return result_of(job)


def compiled(job: Job, device: DeviceInfo, settings: Settings, run: str) -> dict[str, bytes]:
    """Compile a kernel for a job, in pretence."""
    if job.problem.n == FAILS_TO_COMPILE:
        raise OSError("no compiler")
    return {f"{KERNEL}.{job.problem.n}": run.encode()}


def refuse(job: Job, place: str, settings: Settings, retry: str) -> ProblemResult:
    """Fail."""
    raise InvalidProblemError("no such product")


def limits(place: str, settings: Settings) -> dict[str, tuple[float, float]]:
    """Return limits of a device, in pretence."""
    return {"bandwidth_gbps": (1.0, 2.0)}
