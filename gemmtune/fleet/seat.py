"""Seat: a device of a fleet with its process. It runs one job after the other, and survives a job that kills the process."""

import dataclasses
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from typing import Any, Literal, Protocol

from ..device import DeviceInfo
from ..errors import GemmtuneError, raised_as
from ..interrupts import Terminated, raising
from ..settings import Settings
from ..store.key import fingerprint_text
from ..version import __version__
from ..workers.worker import NoWorkerError, Worker, WorkerCrashed, WorkerTimedOut
from .dealer import Task
from .job import Job, JobResult
from .probe import Limits, measured_twice

log = logging.getLogger("gemmtune")

LEAST_LIMIT_S = 1800.0
"""Shortest time limit of a job. What hangs within one has the shorter limits of the settings."""
LIMIT_FACTOR = 20.0
"""Time limit of a job as a multiple of its expected time."""
PROBE_S = 180.0

JobFunction = Callable[[Job, str, Settings], JobResult]
"""Function that tunes a job on a device, such as ``cuda:1``. It is pickled by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Device of a seat: what it is and where. ``limits`` are the results of its probe."""

    info: DeviceInfo
    fingerprint: str
    limits: Limits = field(default_factory=dict)
    version: str = __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Answer of a seat to a task: a result, a failure's reason, a death of its process, a stop, or another store's ``rows``."""

    status: Literal["done", "failed", "died", "stopped"]
    seconds: float
    result: JobResult | None = None
    reason: str = ""
    messages: tuple[str, ...] = ()
    rows: Mapping[str, Any] | None = None


class SeatGone(GemmtuneError, RuntimeError):
    """End of a seat: its machine died, or no process can start there."""


class Seat(Protocol):
    """Device that runs one task at a time. Its methods block, except ``stop``, which comes from another thread."""

    name: str

    def open(self) -> Device:
        """Wait until the seat can take tasks. Raises SeatGone if it never can."""

    def run(self, task: Task) -> Report:
        """Run a task. Raises SeatGone if the seat cannot take another one."""

    def stop(self) -> None:
        """Let the running task keep its measurements and end."""

    def abort(self) -> None:
        """End the seat's processes at once, from another thread."""

    def close(self) -> None:
        """Free what the seat holds. Nothing runs in it any more."""


class LocalSeat:
    """Seat on this machine: a worker process, in which the job's function tunes. ``probed`` measures the device's limits first."""

    def __init__(self, name: str, info: DeviceInfo, function: JobFunction, settings: Settings, *, probed: bool = False) -> None:
        self.name = name
        self._info = info
        self._function = function
        self._settings = settings
        self._probed = probed
        self._worker: Worker | None = None
        self._stopping = False

    def open(self) -> Device:
        """Return the device. The process starts, and is awaited only by a probe."""
        worker = self._opened()
        limits: Limits = {}
        if self._probed:
            try:
                limits = worker.call(measured_twice, self._place, self._settings, timeout_s=PROBE_S)
            except NoWorkerError as error:
                raise SeatGone(str(error)) from error
            except Exception as error:  # noqa: BLE001 - a device that cannot be probed may still tune
                if not self._stopping:
                    log.warning("%s could not be compared with the other devices: %s", self.name, error)
        return Device(info=self._info, fingerprint=fingerprint_text(self._info, self._settings.timing), limits=limits)

    def run(self, task: Task) -> Report:
        """Run a task in the process, which is replaced after its death."""
        begun, limit_s = time.monotonic(), max(LEAST_LIMIT_S, LIMIT_FACTOR * task.expected_s)
        arguments = (self._function, task.job, self._place, self._settings)
        try:
            report = self._opened().call(until_stopped, *arguments, timeout_s=limit_s)
        except NoWorkerError as error:
            raise SeatGone(str(error)) from error
        except (WorkerCrashed, WorkerTimedOut) as error:
            report = Report(status="stopped" if self._stopping else "died", seconds=0.0, reason=error.reason)
        return dataclasses.replace(report, seconds=time.monotonic() - begun)

    def stop(self) -> None:
        """Send SIGTERM to the process: the tuning in it stores what it has measured."""
        self._stopping = True
        if self._worker is not None:
            self._worker.terminate()

    def abort(self) -> None:
        """Kill the process. Processes that it started end with it."""
        self._stopping = True
        if self._worker is not None:
            self._worker.abort()

    def close(self) -> None:
        """Kill the process and wait for its end."""
        if self._worker is not None:
            self._worker.close()

    @property
    def _place(self) -> str:
        return str(self._info.torch_device)

    def _opened(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            with raised_as(SeatGone, NoWorkerError):
                module = getattr(self._function, "func", self._function).__module__  # it may be a partial
                self._worker = Worker(gpu=self._info.type != "cpu", modules=(module,))
        return self._worker


def until_stopped(function: JobFunction, job: Job, place: str, settings: Settings) -> Report:
    """Run a job in this process, and report what came out. SIGTERM ends it, and its measurements are kept."""
    messages: list[str] = []
    report = Report(status="stopped", seconds=0.0)
    with _warnings_of(messages):
        try:
            with raising():
                report = Report(status="done", seconds=0.0, result=function(job, place, settings))
        except Terminated:
            log.debug("%s was stopped", job)
        except Exception as error:  # noqa: BLE001 - a job that fails must not end the fleet
            reason = str(error) if isinstance(error, GemmtuneError) else f"{type(error).__name__}: {error}"
            report = Report(status="failed", seconds=0.0, reason=reason)
    return dataclasses.replace(report, messages=tuple(dict.fromkeys(messages)))


@contextmanager
def _warnings_of(texts: list[str]) -> Iterator[None]:
    """Collect the warnings within the block, and those of gemmtune's log."""
    handler = BufferingHandler(sys.maxsize)
    handler.setLevel(logging.WARNING)
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield
    finally:
        log.removeHandler(handler)
        texts += [*(record.getMessage() for record in handler.buffer), *(str(warning.message) for warning in caught)]


def compiling_share(settings: Settings, seats: int) -> Settings:
    """Return the settings with an equal share of the cores for the compilers of each of several seats of a machine."""
    cores = settings.compile_threads or len(os.sched_getaffinity(0))
    return dataclasses.replace(settings, compile_threads=max(1, cores // max(seats, 1)))
