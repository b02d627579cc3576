"""Session in a worker process, so that a choice that hangs, crashes or corrupts the GPU context costs only itself."""

import dataclasses
import functools
import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from ..choice import Choice, Status
from ..device import DeviceInfo
from ..problem import Problem
from ..problem.rows import RowClass
from ..settings import Settings
from ..workers.pool import WORKERS
from ..workers.worker import START_TIMEOUT_S, NoWorkerError, Worker, WorkerCrashed, WorkerTimedOut
from .offers import libraries_of, offers_for
from .recheck import AFTER
from .samples import Ranking, Sample
from .session import Session

log = logging.getLogger("gemmtune")

WARM_UP_SIZES = (64, 256, 128)
"""M, N and K of the product that warms up a measuring process."""


class RemoteSession(AbstractContextManager["RemoteSession"]):
    """The methods of Session in a worker that stays warm. A crash or time-out becomes a sample, and the worker is replaced."""

    def __init__(self, problem: Problem, device: DeviceInfo, settings: Settings, host_us: float = 0.0) -> None:
        self._arguments = (problem, device, settings, host_us)
        self._kind = measuring_kind(device)
        self._timeout_s = settings.choice_timeout_s
        self._worker: Worker | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the session's resources and return the worker to the pool."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            if worker.alive:
                worker.call(_close, timeout_s=self._timeout_s)
        except (WorkerCrashed, WorkerTimedOut) as error:
            log.debug("the measuring process ended at the end of its session: %s", error.reason)
        WORKERS.give(self._kind, worker)

    def examine(self, choice: Choice, best_us: float | None) -> Sample:
        return self._sample("examine", choice, best_us)

    def prove(self, choice: Choice) -> Sample:
        return self._sample("prove", choice)

    def prove_rows(self, choice: Choice) -> Sample:
        return self._sample("prove_rows", choice)

    def same_rows(self, whole: Choice, parts: Sequence[Choice]) -> Sample:
        return self._sample("same_rows", whole, parts)

    def equal_rows(self, whole: Choice, choice: Choice, rows_class: RowClass, rows: Sequence[int]) -> list[int]:
        """Run ``Session.equal_rows`` in the worker. Return none if the worker dies."""
        found, died = self._done("equal_rows", whole, choice, rows_class, rows)
        if died is not None and found is None:
            log.warning("the bits of %s at M = %d to %d could not be compared: %s", choice.name, rows[0], rows[-1], died.reason)
        return cast(list[int], found or [])

    def _sample(self, method: str, *arguments: Any) -> Sample:
        try:
            sample, died = self._done(method, *arguments)
        except NoWorkerError:  # not the choice's fault, so nothing is stored for it
            raise
        except Exception as error:  # noqa: BLE001 - a choice that cannot be sent or loaded must not stop the tuning
            return Sample(status=Status.RUNTIME_ERROR, reason=f"{type(error).__name__}: {error}")
        if died is not None and died.status is Status.TIMED_OUT:
            return dataclasses.replace(died, reason=f"{died.reason}; the limit is the setting choice_timeout_s")
        return cast(Sample, sample or died)

    def rank(self, choices: Sequence[Choice], rounds_s: float | None = None) -> Ranking:
        """Run ``Session.rank`` in the worker. If the worker dies, try each choice in isolation and rank those that survive."""
        ranking = self._rank(choices, rounds_s)
        if isinstance(ranking, Ranking):
            return ranking
        alone = {c.name: self._rank([c], rounds_s) if len(choices) > 1 else ranking for c in choices}
        failures = {name: one for name, one in alone.items() if isinstance(one, Sample)}
        alive = [c for c in choices if c.name not in failures]
        ranking = self._rank(alive, rounds_s) if alive else Ranking(times={})
        if isinstance(ranking, Ranking):
            return dataclasses.replace(ranking, failures=failures | dict(ranking.failures))
        return Ranking(times={}, failures=failures)

    def recheck(self, choices: Sequence[Choice]) -> dict[str, Sample]:
        """Run ``Session.recheck`` in the worker. If the worker dies, check each choice in isolation."""
        found, died = self._done("recheck", choices, times=len(choices))
        if died is None:
            return cast(dict[str, Sample], found)
        if len(choices) > 1:
            return {name: sample for c in choices for name, sample in self.recheck([c]).items()}
        return {c.name: dataclasses.replace(died, reason=f"{AFTER}: {died.reason}") for c in choices}

    def limits(self, known: Mapping[str, float]) -> tuple[dict[str, float], str]:
        """Run ``Session.limits`` in the worker. Return nothing if the worker dies."""
        found, died = self._done("limits", dict(known))
        if died is not None and found is None:
            log.warning("the limits of %s could not be measured: %s", self._arguments[1].name, died.reason)
        return cast(tuple[dict[str, float], str], found or ({}, ""))

    def _rank(self, choices: Sequence[Choice], rounds_s: float | None) -> Ranking | Sample:
        """Return the ranking, or a failed sample if the worker died."""
        ranking, died = self._done("rank", choices, rounds_s, times=len(choices))
        if died is None:
            return cast(Ranking, ranking)
        log.warning("the final rounds of %s ended the measuring process: %s", ", ".join(c.name for c in choices), died.reason)
        return dataclasses.replace(died, reason=f"in the final rounds: {died.reason}")

    def _done(self, method: str, *arguments: Any, times: int = 1) -> tuple[Any, Sample | None]:
        """Return the result of a session's method, if there is one, and how the worker died of it, if it did."""
        try:
            result, dead = self._opened().call(_do, method, *arguments, timeout_s=self._timeout_s * max(1, times))
        except (WorkerCrashed, WorkerTimedOut) as error:
            status = Status.CRASHED if isinstance(error, WorkerCrashed) else Status.TIMED_OUT
            return None, Sample(status=status, reason=error.reason)
        if not dead:
            return result, None
        self._discard()
        return result, Sample(status=Status.CRASHED, reason="the GPU context is lost")

    def _opened(self) -> Worker:
        """Return the worker with the session open in it."""
        if self._worker is None or not self._worker.alive:
            worker = WORKERS.take(self._kind)
            try:
                worker.call(_open, *self._arguments, timeout_s=max(self._timeout_s, START_TIMEOUT_S))  # imports torch
            except BaseException:
                worker.close()
                raise
            self._worker = worker
        return self._worker

    def _discard(self) -> None:
        if self._worker:
            self._worker.close()


AnySession = Session | RemoteSession


def open_session(problem: Problem, device: DeviceInfo, settings: Settings, host_us: float = 0.0) -> AnySession:
    """Return a session in a worker process, or in this one if the settings say so. Use it as a context manager."""
    return (RemoteSession if settings.tune_in_subprocess else Session)(problem, device, settings, host_us)


def measuring_kind(device: DeviceInfo) -> str:
    """Return the pool's name for workers that measure on a device."""
    return f"measure-{device.type}:{device.index}"


def prepare_measuring(device: DeviceInfo, settings: Settings, *, timed: bool = True) -> None:
    """Start an idle measuring process of a device, with a first product by a GPU's libraries, or torch's unless ``timed``."""
    warm_up = None if device.type == "cpu" else functools.partial(_warm_up, device, settings, timed=timed)
    WORKERS.prepare(measuring_kind(device), 1, (__name__,), warm_up)


def import_meanwhile(device: DeviceInfo, module: str) -> None:
    """Import a module in the idle measuring process of a device, if there is one, while the caller continues."""
    WORKERS.post(measuring_kind(device), functools.partial(importlib.import_module, module))


# The worker's side: the session that is open in this process.
_sessions: list[Session] = []


def _warm_up(device: DeviceInfo, settings: Settings, *, timed: bool) -> None:
    problem = Problem.mm(*WARM_UP_SIZES, device_type=device.type)
    libraries = libraries_of(device, settings) if timed else ()
    offers = offers_for(problem, device, dataclasses.replace(settings, backends=libraries or ("aten",)))
    with Session(problem, device, settings) as session:
        for choice in offers.choices[:2]:
            if timed:
                session.examine(choice, None)
            else:
                session.prove(choice)


def _open(problem: Problem, device: DeviceInfo, settings: Settings, host_us: float) -> None:
    _close()
    _sessions.append(Session(problem, device, settings, host_us, root=os.getppid()))


def _close() -> None:
    while _sessions:
        _sessions.pop().close()


def _do(method: str, *args: Any) -> tuple[Any, bool]:
    """Return the result of a session's method, and True if it has corrupted the process."""
    session = _sessions[-1]
    try:
        return getattr(session, method)(*args), session.dead
    except Exception:
        if session.dead:
            return None, True
        raise
