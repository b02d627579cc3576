"""Work of a process while nobody asks it, with that of what it has started, and what it keeps."""

import os
import time

from .conduct import Conduct
from .process import Fork

BUSY_SHARE, BUSY_S = 0.05, 0.02
"""Share of the CPU time of calls, and seconds, that a GEMM may use between calls. Honest ones use a thousandth."""
WATCH_S, WATCHED_S, WATCHES = 0.25, 0.03, 2
"""Seconds for which a GEMM and what it has started are watched in the end, their most CPU time in these, and how often."""
KEPT_BYTES = 2**28
"""Memory that a GEMM may keep without a note."""
THREADS_OF_A_CORE = 3
"""Threads of each core that a GEMM may keep without a note: those of torch, of a BLAS library and its own."""
KEPT_FILES = 200
"""Files that a GEMM may keep open. One that opens some in each call has more."""


class Between:
    """CPU time of one process, in its answers and between them, and its threads and memory."""

    def __init__(self) -> None:
        self._idle_s = self._busy_s = self._answered_s = self._started_s = self._asked_s = 0.0
        self._threads = self._bytes = self._files = 0

    def begin(self) -> None:
        """Begin with a new process, whose start is no work."""
        self._answered_s = self._started_s = 0.0

    def opened(self, fork: Fork) -> None:
        """Remember what the process has after its import."""
        self._threads, self._bytes, self._files = fork.threads(), fork.resident_bytes(), _files(fork)

    def rest(self, fork: Fork) -> None:
        """Count the time since the latest answer."""
        if self._answered_s:
            now_s, started_s = fork.cpu_s(), fork.started_s()
            self._idle_s += max(now_s - self._answered_s, 0.0) + max(started_s - self._started_s, 0.0)
            self._answered_s, self._started_s = now_s, started_s

    def ask(self, fork: Fork) -> None:
        """Begin a question."""
        self.rest(fork)
        self._asked_s = fork.cpu_s()

    def answer(self, fork: Fork) -> None:
        """End a question."""
        self._answered_s = fork.cpu_s()
        self._busy_s += max(self._answered_s - self._asked_s, 0.0)

    def deliver(self, fork: Fork | None) -> None:
        """End a call. What the process has started may have worked for it until now."""
        self._started_s = fork.started_s() if fork is not None else 0.0

    @property
    def latest_s(self) -> float:
        """CPU time of the latest answer."""
        return self._answered_s - self._asked_s

    def found(self, fork: Fork) -> list[tuple[Conduct, str]]:
        """Watch the process for a while. Return its work between calls, and what it keeps."""
        found = []
        if self._idle_s > BUSY_S + BUSY_SHARE * self._busy_s:
            found.append((Conduct.BETWEEN, f"{self._idle_s:.2f} s of CPU time, and {self._busy_s:.2f} s in calls"))
        used_s = [_watched(fork)]
        while used_s[-1] > WATCHED_S and len(used_s) < WATCHES:  # the first may show the end of other work
            used_s.append(_watched(fork))
        if used_s[-1] > WATCHED_S:
            text = f"{used_s[-1]:.2f} s of CPU time, with what it started, in {WATCH_S:g} s without a call"
            found.append((Conduct.BETWEEN, text))
        if (threads := fork.threads() - self._threads) > THREADS_OF_A_CORE * len(os.sched_getaffinity(0)):
            found.append((Conduct.THREADS, f"{threads} more than after its import"))
        if (kept := fork.resident_bytes() - self._bytes) > KEPT_BYTES:
            found.append((Conduct.MEMORY, f"{kept / 2**20:.0f} MiB"))
        if (files := _files(fork) - self._files) > KEPT_FILES:
            found.append((Conduct.FILES, f"{files} more than after its import"))
        return found


def _files(fork: Fork) -> int:
    try:
        return len(os.listdir(f"/proc/{fork.pid}/fd"))
    except OSError:  # it has ended, or hides from others
        return 0


def _watched(fork: Fork) -> float:
    before_s = fork.cpu_s() + fork.descendants_s()
    time.sleep(WATCH_S)
    return fork.cpu_s() + fork.descendants_s() - before_s
