"""Warm worker processes, kept between tunings and ended when they have been idle for a while."""

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence

from .worker import NoWorkerError, Worker


class Pool:
    """Idle workers by kind. A kind is any text: ``compile`` workers see no GPU, the others name the device that they measure
    on.

    Args:
        idle_s: seconds after which an idle worker ends: each holds a few hundred MB, and a measuring one a GPU context too.
    """

    def __init__(self, *, idle_s: float = 60.0) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[tuple[str, Worker, float]] = []
        self._timer: threading.Timer | None = None

    def take(self, kind: str) -> Worker:
        """Return an idle worker of that kind, or a new one. The caller gives it back."""
        with self._lock:
            for entry in reversed(self._idle):
                if entry[0] == kind and entry[1].alive:
                    self._idle.remove(entry)
                    return entry[1]
        return Worker(gpu=kind != "compile")

    def give(self, kind: str, worker: Worker) -> None:
        """Put a worker back. A dead one is dropped."""
        if not worker.alive:
            return
        with self._lock:
            self._idle.append((kind, worker, time.monotonic()))
            self._schedule()

    def prepare(self, kind: str, count: int, modules: Sequence[str] = (), warm_up: Callable[[], object] | None = None) -> None:
        """Start workers so that ``count`` of that kind are idle.

        They import ``modules`` and run ``warm_up`` while the caller continues. If none can be started, ``take`` reports it.
        """
        with self._lock:
            present = sum(entry[0] == kind for entry in self._idle)
        for _ in range(count - present):
            try:
                worker = Worker(gpu=kind != "compile", modules=modules)
            except NoWorkerError:
                return
            if warm_up is not None:
                worker.post(warm_up)
            self.give(kind, worker)

    def post(self, kind: str, function: Callable[[], object]) -> None:
        """Run a function in the idle workers of that kind while the caller continues."""
        with self._lock:
            for name, worker, _ in self._idle:
                if name == kind:
                    worker.post(function)

    def close(self) -> None:
        """End all idle workers now."""
        with self._lock:
            workers = [worker for _, worker, _ in self._idle]
            self._idle.clear()
            if self._timer:
                self._timer.cancel()
                self._timer = None
        for worker in workers:
            worker.close()

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self._idle_s, self._end_unused)
            self._timer.daemon = True
            self._timer.start()

    def _end_unused(self) -> None:
        with self._lock:
            old = [entry for entry in self._idle if time.monotonic() - entry[2] >= self._idle_s]
            self._idle = [entry for entry in self._idle if entry not in old]
            self._timer = None
            if self._idle:
                self._schedule()
        for _, worker, _ in old:
            worker.close()

    def _forget(self) -> None:
        """Reset the pool in a fork of this process, which owns none of the workers."""
        self._lock = threading.Lock()
        self._idle = []
        self._timer = None


WORKERS = Pool()
"""Pool of this process."""

atexit.register(WORKERS.close)
os.register_at_fork(after_in_child=WORKERS._forget)
