"""Forks of this process: what OpenMP's threads, our locks and our imports are in the child."""

import ctypes
import importlib
import os
import sys
import threading
import warnings
import weakref
from typing import Any

SOFT = 1
"""``omp_pause_soft``: end the threads, and start them again when they are needed."""
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


class _Imports:
    """Late imports of our modules, which a fork waits for.

    A child would wait forever for a module that another thread imports at the fork, because that thread is lost.
    """

    LONGEST_S = 60.0
    """Longest wait of a fork. The import could itself wait for a module that the forking thread imports."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._held = False

    def wait(self) -> None:
        """Wait before a fork until no other thread imports."""
        self._held = self.lock.acquire(timeout=self.LONGEST_S)

    def go_on(self) -> None:
        """Let threads of the parent import again."""
        if self._held:
            self.lock.release()

    def begin(self) -> None:
        """Free the lock in the child, even if a lost thread held it."""
        if self._held:
            self.lock.release()
        else:
            self.lock._at_fork_reinit()  # type: ignore[attr-defined]


def import_module(name: str, package: str | None = None) -> Any:
    """Import a module of ours at its first use, as ``importlib.import_module`` does. A fork waits for the end."""
    with imports.lock:
        return importlib.import_module(name, package)


_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()
threads = _Threads()
imports = _Imports()
os.register_at_fork(before=threads.end, after_in_child=threads.begin)
os.register_at_fork(after_in_child=_free_locks)
os.register_at_fork(before=imports.wait, after_in_parent=imports.go_on, after_in_child=imports.begin)
