"""Tuning in the background: a process of low priority makes tables while this one is idle, and calls take them over."""

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..device import DeviceInfo
from ..dispatch.host import host_us
from ..errors import InvalidProblemError, NoValidChoicesError, UnavailableError
from ..problem.rows import RowClass
from ..selector.progress import Progress
from ..selector.ranges import tune_rows
from ..selector.siblings import Siblings
from ..selector.stored_tables import stored_table
from ..settings import Settings, current, use
from ..store.key import fingerprint_text
from ..store.store import open_store
from ..workers.worker import NoWorkerError, Worker, WorkerCrashed, WorkerTimedOut
from .measured import apart_on
from .swap import swaps

log = logging.getLogger("gemmtune")

ROWS = {"cpu": range(1, 257), "cuda": range(1, 8193)}
"""Numbers of rows of a table by device, unless the caller gives others."""
TABLE_S = 7 * 86400.0
"""Time limit of one table, which may wait for an idle machine all the time. Each choice has the limit of the settings."""
WINDOW_S = 0.1
"""Shortest time over which the work of the model's process is observed. Linux counts in steps of 10 ms."""
IDLE_SHARE = 0.15
"""Share of one core below which the model's process counts as idle. A process that launches or awaits kernels uses one."""
PAUSE_S = 0.5
"""Time without work of the model's process after which measuring goes on."""
NICE = 19
"""Priority of the tuning process and of its compilers, the lowest."""
ENDING_S = 3.0
"""Time in which a tuning process stores what it has measured, when it is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One table to make."""

    rows_class: RowClass
    rows: range
    device: DeviceInfo
    settings: Settings

    @property
    def made(self) -> bool:
        """True if the store has the table."""
        machine = fingerprint_text(self.device, self.settings.timing)
        known = stored_table(self.rows_class, machine, open_store(self.settings))
        return known is not None and known[0].covers(filter(self.rows_class.has, self.rows))


class BackgroundTuning:
    """Tuning of tables in another process, for the models of this process. ``print`` shows its progress."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._worker: Worker | None = None
        self._thread: threading.Thread | None = None
        self._models: weakref.WeakKeyDictionary[nn.Module, set[Job]] = weakref.WeakKeyDictionary()  # and what each asked for
        self._made = self._failed = self._dropped = 0
        self._stopped = ""

    def __str__(self) -> str:
        with self._changed:
            left = len(self._jobs)
            why = f" ({self._stopped})" if self._stopped else ""
            why = f", {self._failed} failed{why}" if self._failed else why
        return f"background tuning: {self._made} tables made, {left or self._dropped} left{why}"

    @property
    def done(self) -> bool:
        """True if nothing is left to make, or nothing more will be made."""
        return self._thread is None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to make, at most ``timeout_s`` seconds. Return True then. Later calls use the tables."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._thread is None, timeout_s)
        swaps.apply()
        return done

    def stop(self) -> None:
        """End the tuning process. Finished tables and the measurements so far stay in the store."""
        with self._changed:
            self._dropped = len(self._jobs) or self._dropped
            self._jobs.clear()
            self._stopped = "stopped"
            worker, thread = self._worker, self._thread
        if worker is not None and worker.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(worker.pid, signal.SIGTERM)
        if thread is not None and thread is not threading.current_thread():
            thread.join(ENDING_S)
            if thread.is_alive() and worker is not None:
                worker.abort()
                thread.join(ENDING_S)

    def leave(self, models: Iterable[nn.Module]) -> None:
        """Make no table any more that only these models asked for. One that is being made ends early if no other is left."""
        with self._changed:
            mine = set[Job]().union(*(self._models.pop(model, ()) for model in models))
            mine.difference_update(*self._models.values())
            if not mine.intersection(self._jobs):
                return
            others = [job for job in self._jobs if job not in mine]
            if others:
                self._jobs = deque([*self._jobs][:1] + others if self._jobs[0] in mine else others)
        if not others:
            self.stop()

    def add(self, jobs: Iterable[Job], model: nn.Module | None = None) -> None:
        """Make these tables, which ``model`` wants, after the earlier ones, except those that the store has."""
        wanted = [job for job in jobs if not job.made]
        with self._changed:
            if model is not None:
                self._models.setdefault(model, set()).update(wanted)
            self._stopped, self._dropped = "", 0
            self._jobs += [job for job in dict.fromkeys(wanted) if job not in self._jobs]
            if self._jobs and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gemmtune-background", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        """Make one table after the other, until none is left or the process dies."""
        while True:
            with self._changed:
                if not self._jobs:
                    break
                job = self._jobs[0]
            try:
                self._make(job)
            except (WorkerCrashed, WorkerTimedOut, NoWorkerError) as error:
                self._give_up(error)
        # The process holds memory of the device: it does not outlive its work.
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        with self._changed:
            self._thread = None
            again = bool(self._jobs)
            self._changed.notify_all()
        if again:  # added while the process ended
            self.add(())

    def _make(self, job: Job) -> None:
        with self._changed:
            if job not in self._jobs:  # stopped in between
                return
            if self._worker is None:
                self._worker = Worker(modules=(__name__,))
            worker = self._worker
        begun, made = time.monotonic(), False
        try:
            worker.call(make_table, job, timeout_s=TABLE_S)
            made = True
            log.info("background tuning: %s in %.0f s", job.rows_class, time.monotonic() - begun)
            swaps.add((job.rows_class, job.device, job.settings))
        except NoValidChoicesError as error:
            log.warning("torch runs %s: %s", job.rows_class, error)
        except (WorkerCrashed, WorkerTimedOut, NoWorkerError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the tuning of one weight raises must not stop the others
            log.warning("background tuning: no table of %s: %s: %s", job.rows_class, type(error).__name__, error)
        with self._changed:
            self._made, self._failed = self._made + made, self._failed + (not made)
            if job in self._jobs:
                self._jobs.remove(job)

    def _give_up(self, error: UnavailableError | WorkerCrashed | WorkerTimedOut) -> None:
        """Drop all jobs after the end of the tuning process. Say so once, unless it was stopped."""
        with self._changed:
            left = len(self._jobs)
            self._dropped = left or self._dropped
            self._jobs.clear()
            stopped, self._stopped = self._stopped, self._stopped or str(error).splitlines()[0]
        if not stopped:
            log.warning(
                "background tuning ended with %d tables left, and models run what is known: %s; optimize(model, "
                'tune="background") begins again',
                left,
                error,
            )


_tuning = BackgroundTuning()
atexit.register(_tuning.stop)


def _forget() -> None:
    """Reset the tuning in a fork of this process, which owns neither the thread nor the process."""
    _tuning._reset()
    swaps.forget()


os.register_at_fork(after_in_child=_forget)


def tuning_in_background() -> BackgroundTuning:
    """Return this process's background tuning, which serves all models of ``optimize(model, tune="background")``.

    gemmtune.optimize(model, tune="background")
    model(x)  # serves at once
    gemmtune.tuning_in_background().wait()  # or .stop(), or .done
    """
    return _tuning


def in_background(tune: Any, *, batch_invariant: bool) -> bool:
    """Return True for ``tune="background"``. Raise InvalidProblemError for another text, or if the settings forbid it."""
    if not isinstance(tune, str):
        return False
    if tune != "background":
        raise InvalidProblemError(f"optimize: tune: got {tune!r}, expected example inputs or 'background'")
    chosen = current()
    if batch_invariant or chosen.rows != "shared":
        got = "batch_invariant=True" if batch_invariant else f"the setting rows={chosen.rows!r}"
        why = "a table that comes later changes bits" if batch_invariant else "no table is used"
        raise InvalidProblemError(f"optimize: tune: got 'background' with {got}, with which {why}; tune before, by tune=inputs")
    return True


# The tuning process's side.
_siblings: dict[tuple[DeviceInfo, Settings], Siblings] = {}


def make_table(job: Job) -> None:
    """Make a table in the tuning process, between the work of the process that started it."""
    os.nice(max(0, NICE - os.nice(0)))
    device, chosen, patience = job.device, job.settings, Patience(os.getppid())
    siblings = _siblings.setdefault((device, chosen), Siblings(device, chosen))
    with use(chosen):
        cost_us, apart = host_us(device, chosen), apart_on(device)
        tune_rows(job.rows_class, job.rows, device, chosen, patience, host_us=cost_us, apart=apart, siblings=siblings)


class Patience(Progress):
    """Listener that keeps a tuning waiting at its next step while another process works.

    It sees the time that the process has on the cores. A process that launches kernels or waits for them has such time. Work of
    other processes shows in the measurements alone, which it marks.
    """

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._before = time.monotonic(), self._worked_s()

    def _wait(self, *_: object, **__: object) -> None:
        while time.monotonic() - self._before[0] >= WINDOW_S and self._share() > IDLE_SHARE:
            time.sleep(PAUSE_S)

    begin = stage = end = _wait

    def _share(self) -> float:
        """Return the share of one core that the process had since the last question."""
        now, worked_s = time.monotonic(), self._worked_s()
        (since, before_s), self._before = self._before, (now, worked_s)
        return (worked_s - before_s) / (now - since)

    def _worked_s(self) -> float:
        """Return the seconds that the process worked, 0 where the system does not say."""
        try:
            words = self._stat.read_text(errors="replace").rpartition(")")[2].split()
            return sum(map(int, words[11:13])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return 0.0
