"""Compilation of many choices at the same time, in worker processes that see no GPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ..choice import Choice, Status
from ..errors import CompileError
from ..settings import Settings
from ..workers.apply import applied
from ..workers.pool import WORKERS
from ..workers.worker import Worker, WorkerCrashed, WorkerTimedOut

__all__ = ["COMPILING", "Compilation", "CompileFailure", "precompile"]

COMPILING = "compile"
"""The pool's kind of the workers that compile."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFailure:
    """Why a choice has no compiled kernel: COMPILE_ERROR, COMPILE_TIMEOUT or CRASHED, with what the compiler said."""

    status: Status
    reason: str


def precompile(choices: Sequence[Choice], settings: Settings, progress: Progress | None = None) -> dict[str, CompileFailure]:
    """Compile what the choices need and the cache lacks, ``settings.compile_processes`` at a time, and wait for all of it.

    One compilation for each distinct ``compile_key``. ``progress(done, total)`` is called in this thread, first with done = 0.
    Returns the failures by the name of the choice (of every choice that shares the key). An interrupt kills the compilers.
    """
    with Compilation(choices, settings) as compilation:
        return compilation.wait(choices, progress)


class Compilation:
    """Compilations under way in the background, in the order of the choices. A context manager; its end kills what is unfinished.

    Choices may belong to several problems: while the first is measured, the next ones compile.
    """

    def __init__(self, choices: Iterable[Choice], settings: Settings) -> None:
        self._settings = settings
        self._changed = threading.Condition()
        self._outcomes: dict[str, CompileFailure | None] = {}
        self._error: BaseException | None = None
        self._stopping = False
        self._busy: set[Worker] = set()
        jobs = {c.compile_key: c for c in reversed(list(choices)) if c.compile_key is not None and not c.compiled}
        self._keys = frozenset(jobs)
        self._jobs: queue.SimpleQueue[tuple[str, Choice]] = queue.SimpleQueue()
        for key, choice in reversed(jobs.items()):
            self._jobs.put((key, choice))
        count = min(settings.compile_processes, len(jobs))
        self._threads = [threading.Thread(target=self._work, name=f"gemmtune-compile-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def wait(self, choices: Iterable[Choice], progress: Progress | None = None) -> dict[str, CompileFailure]:
        """Wait until the kernels of these choices are there. Returns the failures by the name of the choice."""
        keys = {c.name: c.compile_key for c in choices if c.compile_key in self._keys}
        wanted = set(keys.values())
        reported = -1
        while wanted and reported < len(wanted):
            with self._changed:
                while not self._error and len(wanted & self._outcomes.keys()) == reported:
                    self._changed.wait()
                if self._error:
                    raise self._error
                done = len(wanted & self._outcomes.keys())
            if progress:
                for count in range(reported + 1, done + 1):
                    progress(count, len(wanted))
            reported = done
        outcomes = {name: self._outcomes[key] for name, key in keys.items() if key is not None}
        return {name: outcome for name, outcome in outcomes.items() if outcome}

    def close(self) -> None:
        """Kill the compilations that are under way and forget those that wait."""
        with self._changed:
            self._stopping = True
            abandoned = list(self._busy)
        for worker in abandoned:
            worker.abort()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        worker: Worker | None = None
        try:
            while not self._stopping:
                try:
                    key, choice = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if worker is None or not worker.alive:
                    worker = WORKERS.take(COMPILING)
                outcome = self._compile(worker, choice)
                with self._changed:
                    self._outcomes[key] = outcome
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            if worker:
                WORKERS.give(COMPILING, worker)

    def _compile(self, worker: Worker, choice: Choice) -> CompileFailure | None:
        with self._changed:
            if self._stopping:
                return CompileFailure(status=Status.CRASHED, reason="the compilation was interrupted")
            self._busy.add(worker)
        try:
            worker.call(compile_choice, choice, self._settings, timeout_s=self._settings.compile_timeout_s)
        except WorkerTimedOut:
            limit = f"{self._settings.compile_timeout_s:g} s"
            return CompileFailure(status=Status.COMPILE_TIMEOUT, reason=f"not compiled within {limit} (compile_timeout_s)")
        except WorkerCrashed as error:
            return CompileFailure(status=Status.CRASHED, reason=error.reason)
        except CompileError as error:
            return CompileFailure(status=Status.COMPILE_ERROR, reason=error.output)
        except Exception as error:  # noqa: BLE001 - whatever else a backend raises is its way to say that it cannot compile this
            return CompileFailure(status=Status.COMPILE_ERROR, reason=f"{type(error).__name__}: {error}")
        finally:
            with self._changed:
                self._busy.discard(worker)
        return None


def compile_choice(choice: Choice, settings: Settings) -> None:
    """Runs in the worker process."""
    with applied(settings):
        choice.compile()
