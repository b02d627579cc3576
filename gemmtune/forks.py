"""Forks of this process: what OpenMP's threads, our locks and our imports are in the child."""

import ctypes
import os
import sys
import threading
import time
import types
import warnings
import weakref
from typing import Any

SOFT = 1
"""``omp_pause_soft``: end the threads, and start them again when they are needed."""
IMPORTER = "<frozen importlib._bootstrap>"
"""File of Python's functions that import, in the stacks of threads."""
LONGEST_WAIT_S = 60.0
"""Longest wait of a fork for imports. One of them could itself wait for a module that the forking thread imports."""
NOT_GNU = "__kmpc_fork_call"
"""Function of LLVM's and Intel's runtimes, which start new threads in a child without help."""


class _Threads:
    """Threads of torch's OpenMP runtime that belong to the forking thread.

    GNU's runtime waits forever for threads that a child has not got. So they end before a fork: parent and child start new
    ones when they need them.
    """

    def __init__(self) -> None:
        self.usable = True
        """False in a child of a process whose threads could not be ended."""
        self._ended = True

    def end(self) -> None:
        """End the threads before a fork. Without torch, or with another runtime, there is nothing to do."""
        runtime = openmp() if self.usable else None
        self._ended = self.usable
        if runtime is not None and not hasattr(runtime, NOT_GNU):
            pause = getattr(runtime, "omp_pause_resource_all", None)
            self._ended = pause is not None and pause(SOFT) == 0

    def begin(self) -> None:
        """Keep a child whose parent's threads did not end from waiting for them."""
        if self._ended:
            return
        self.usable = False
        sys.modules["torch"].set_num_threads(1)
        warnings.warn(
            "fork: got OpenMP threads that could not be ended (libgomp before GCC 9, or a fork within a parallel region), which "
            "this process would wait for forever; torch and gemmtune use one thread here. Fork before the first product, or "
            "start processes by the method 'spawn'.",
            RuntimeWarning,
            stacklevel=1,
        )


def openmp() -> ctypes.CDLL | None:
    """Return a library in which the functions of torch's OpenMP runtime are found, or None before torch is imported.

    A name such as ``libgomp.so.1`` could be another runtime's, because wheels rename theirs.
    """
    torch: Any = sys.modules.get("torch")
    file = getattr(getattr(torch, "_C", None), "__file__", None)
    try:
        return None if file is None else ctypes.CDLL(file)
    except OSError:
        return None


def lock() -> threading.Lock:
    """Return a lock that is free in a child, even if another thread held it at the fork."""
    made = threading.Lock()
    _locks.add(made)
    return made


def _free_locks() -> None:
    for one in list(_locks):
        one._at_fork_reinit()  # type: ignore[attr-defined]


def wait_for_imports() -> None:
    """Wait before a fork until no other thread imports a module of ours, or any module for us.

    A child would wait forever for such a module, because the thread that imports it is lost. No lock keeps others from beginning
    just now: Python's own would have to be held while the functions of other libraries that precede a fork take theirs.
    """
    latest = time.monotonic() + LONGEST_WAIT_S
    while _others_import() and time.monotonic() < latest:
        time.sleep(0.001)


def _others_import() -> bool:
    stacks = sys._current_frames()
    del stacks[threading.get_ident()]
    return any(map(_imports, stacks.values()))


def _imports(frame: types.FrameType | None) -> bool:
    importing = False
    while frame is not None:
        importing |= frame.f_code.co_filename == IMPORTER
        ours = str(frame.f_globals.get("__name__")).partition(".")[0] == __package__
        if ours and (importing or frame.f_code.co_name == "<module>"):
            return True
        frame = frame.f_back
    return False


_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()
threads = _Threads()
os.register_at_fork(before=wait_for_imports)  # the first that is registered runs last, so what others begin until then counts
os.register_at_fork(before=threads.end, after_in_child=threads.begin)
os.register_at_fork(after_in_child=_free_locks)
