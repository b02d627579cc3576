"""Priority, cores and scheduler of processes that an untrusted one can change: the caller, and torch's process with its threads."""

import contextlib
import os
from pathlib import Path

Of = tuple[int, tuple[int, ...], int]


def standing(thread: int = 0) -> Of:
    """Return the priority, the cores and the scheduler of a thread, by default of this one."""
    return os.getpriority(os.PRIO_PROCESS, thread), tuple(sorted(os.sched_getaffinity(thread))), os.sched_getscheduler(thread)


def restore(before: Of, thread: int = 0) -> None:
    """Set the priority, the cores and the scheduler of a thread, as far as the system lets this process."""
    if os.sched_getscheduler(thread) != before[2]:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, before[2], os.sched_param(0))
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, thread, before[0])
    with contextlib.suppress(OSError):
        os.sched_setaffinity(thread, before[1])


class Standings:
    """Standings of a process's threads, each as it was when the thread was seen first."""

    def __init__(self) -> None:
        self._known: dict[int, Of] = {}

    def changes(self, pid: int) -> list[tuple[Of, Of]]:
        """Return what has changed since the last call, and set it back."""
        found = []
        with contextlib.suppress(OSError):
            for thread in map(int, os.listdir(Path(f"/proc/{pid}/task"))):
                with contextlib.suppress(ProcessLookupError):
                    now = standing(thread)
                    before = self._known.setdefault(thread, now)
                    if now != before:
                        found.append((before, now))
                        restore(before, thread)
                        self._known[thread] = standing(thread)  # the system may forbid it
        return found
