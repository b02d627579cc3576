"""Shared objects of the C++ compiler as choices: found in the cache or compiled, and loaded with torch's threads."""

import ctypes
import functools
import os
from abc import abstractmethod
from pathlib import Path

from ... import forks
from ...cache import cached, present
from ...choice import Choice
from ...toolchain.made_once import opened
from .compiler import Compilable, artifact_file, compile_source, why_no_compiler

_OPENMP_ENTRIES = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")


class SourceChoice(Choice):
    """Choice whose kernel is one shared object of the system's C++ compiler."""

    @property
    @abstractmethod
    def compilable(self) -> Compilable:
        """Source to compile."""

    @property
    def compile_key(self) -> str:
        return self.compilable.digest

    @property
    def compiled(self) -> bool:
        return present(cached(*artifact_file(self.compilable)))

    @property
    def obstacle(self) -> str | None:
        return None if self.compiled else why_no_compiler()

    def compile(self) -> None:
        compile_source(self.compilable, self.name)

    def load(self) -> ctypes.CDLL:
        return opened(lambda: compile_source(self.compilable, self.name), load)


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """Load the library at ``path`` with the threads of torch's OpenMP runtime, if there is one. Raises OSError."""
    library = ctypes.CDLL(str(path))
    library.gemmtune_runtime.argtypes = [ctypes.c_void_p] * len(_OPENMP_ENTRIES)
    library.gemmtune_runtime.restype = None
    library.gemmtune_runtime(*_openmp_entries())
    _loaded.append(library)
    return library


def _openmp_entries() -> list[int | None]:
    """Return addresses in torch's OpenMP runtime, or nulls if it has none of GNU's functions."""
    runtime = forks.openmp()
    if not all(hasattr(runtime, name) for name in _OPENMP_ENTRIES):
        return [None] * len(_OPENMP_ENTRIES)
    return [ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value for name in _OPENMP_ENTRIES]


def _use_openmp_again() -> None:
    """Give the libraries the runtime in a forked child, where it starts new threads. They stop using it at a fork."""
    if forks.threads.usable:
        for library in _loaded:
            library.gemmtune_runtime(*_openmp_entries())


_loaded: list[ctypes.CDLL] = []
os.register_at_fork(after_in_child=_use_openmp_again)
