"""Concurrent compilation of many choices, in worker processes without access to a GPU."""

import contextlib
import functools
import importlib.util
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager

from ..choice import Choice, Status
from ..errors import CompileError
from ..settings import Settings
from ..timing.neighbours import Watch
from ..toolchain import cubin, triton_kernels
from ..workers import compiling
from ..workers.pool import WORKERS
from ..workers.worker import NoWorkerError, Worker, WorkerCrashed, WorkerTimedOut
from .accidents import WHILE_BUSY
from .samples import Sample

COMPILING = "compile"
"""The pool's name for workers that compile."""

Progress = Callable[[int, int], None]


def prepare_compiling(settings: Settings, most: int | None = None) -> None:
    """Start the compiler processes, or the ``most`` that are needed, unless they are idle already.

    They import compilers while the caller continues. Compiling for a GPU needs no torch, whose import would take longer.
    """
    triton = ("triton.compiler",) if importlib.util.find_spec("triton") is not None else ()
    modules = (compiling.__name__, cubin.__name__, triton_kernels.__name__, *triton)
    WORKERS.prepare(COMPILING, min(most or settings.compile_processes, settings.compile_processes), modules)


def precompile(
    choices: Sequence[Choice], settings: Settings, progress: Progress | None = None, until: float = math.inf
) -> dict[str, Sample]:
    """Compile the kernels that the cache lacks, ``settings.compile_processes`` at a time, and wait for all of them.

    Each distinct ``compile_key`` is compiled once. ``progress(done, total)`` is called in this thread, first with done = 0.
    Return the failures by the name of each choice that shares the key. An interrupt kills the compilers, and so does the time
    ``until`` of ``time.monotonic``.
    """
    if time.monotonic() > until:
        return {}
    with Compilation(choices, settings) as compilation:
        return compilation.wait(choices, progress, until)


class Compilation(AbstractContextManager["Compilation"]):
    """Compilations in the background for one or several problems, in the order of the choices. Leaving the context kills them."""

    def __init__(self, choices: Iterable[Choice], settings: Settings) -> None:
        self._settings = settings
        self._watch = Watch()
        self._lock = threading.Lock()
        self._here = threading.Lock()
        self._stopping = False
        self._busy: set[Worker] = set()
        self._outcomes: dict[str | None, Future[Sample | None]] = {}
        self.add(choices)

    def __exit__(self, *_: object) -> None:
        self.close()

    @functools.cached_property
    def _executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._settings.compile_processes, thread_name_prefix="gemmtune-compile")

    def add(self, choices: Iterable[Choice]) -> None:
        """Compile further choices after the earlier ones, each kernel once."""
        jobs = {
            c.compile_key: c for c in reversed(list(choices)) if c.compile_key not in (None, *self._outcomes) and not c.compiled
        }
        for key, choice in reversed(jobs.items()):
            self._outcomes[key] = self._executor.submit(self._compile, choice)

    def wait(self, choices: Iterable[Choice], progress: Progress | None = None, until: float = math.inf) -> dict[str, Sample]:
        """Wait until the kernels of these choices exist, or ``until`` that time. Return the failures by the name of the choice."""
        outcomes = {c.name: self._outcomes[c.compile_key] for c in choices if c.compile_key in self._outcomes}
        _follow(set(outcomes.values()), progress or (lambda _done, _total: None), until)
        failures = {name: outcome.result() for name, outcome in outcomes.items() if outcome.done()}
        return {name: failure for name, failure in failures.items() if failure}

    def wait_for_all(self, progress: Progress) -> None:
        _follow(set(self._outcomes.values()), progress)

    def close(self) -> None:
        """Kill running compilations and drop the queued ones."""
        with self._lock:
            self._stopping = True
            abandoned = list(self._busy)
        for worker in abandoned:
            worker.abort()
        self._executor.shutdown(cancel_futures=True)

    def _compile(self, choice: Choice) -> Sample | None:
        """Compile in a worker process. If none can start and the settings allow it, compile in this process."""
        try:
            return self._compile_in_worker(choice)
        except NoWorkerError:
            if self._settings.tune_in_subprocess:
                raise
        with self._here:
            return self._attempted(lambda: compiling.run(choice.compile, self._settings))

    def _compile_in_worker(self, choice: Choice) -> Sample | None:
        with self._lock:
            if self._stopping:
                return Sample(status=Status.CRASHED, reason="the compilation was interrupted")
            worker = WORKERS.take(COMPILING)
            self._busy.add(worker)
        limit_s = self._settings.compile_timeout_s
        try:
            return self._attempted(lambda: worker.call(compiling.run, choice.compilation(), self._settings, timeout_s=limit_s))
        finally:
            with self._lock:
                self._busy.discard(worker)
            WORKERS.give(COMPILING, worker)

    def _attempted(self, compilation: Callable[[], None]) -> Sample | None:
        try:
            compilation()
        except WorkerTimedOut:
            reason = f"not compiled within {self._settings.compile_timeout_s:g} s "
            seen = self._watch.seen()
            return Sample(status=Status.COMPILE_TIMEOUT, reason=reason + (f"{WHILE_BUSY}{seen}" if seen else "(compile_timeout_s)"))
        except WorkerCrashed as error:
            return Sample(status=Status.CRASHED, reason=error.reason)
        except CompileError as error:
            return Sample(status=Status.COMPILE_ERROR, reason=error.output)
        except NoWorkerError:
            raise
        except Exception as error:  # noqa: BLE001 - a backend may raise anything if it cannot compile a choice
            return Sample(status=Status.COMPILE_ERROR, reason=f"{type(error).__name__}: {error}")
        return None


def _follow(wanted: set[Future[Sample | None]], progress: Progress, until: float = math.inf) -> None:
    """Report the progress of compilations until all have ended, or ``until`` that time."""
    if wanted:
        progress(0, len(wanted))
        rest_s = None if until == math.inf else max(until - time.monotonic(), 0.0)
        with contextlib.suppress(TimeoutError):
            for done, _ in enumerate(as_completed(wanted, rest_s), 1):
                progress(done, len(wanted))
