"""Shared objects of the C++ compiler as choices: found in the cache or compiled, and loaded with torch's threads."""

from __future__ import annotations

import ctypes
import functools
import os
from abc import abstractmethod
from pathlib import Path

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
        """Hash of source and flags: one shared object serves every size."""
        return self.compilable.digest

    @property
    def compiled(self) -> bool:
        """True if the shared object is in the cache."""
        return present(cached(*artifact_file(self.compilable)))

    @property
    def obstacle(self) -> str | None:
        """Reason why the kernel cannot run here: it is not compiled, and nothing can be compiled. None if it can run."""
        return None if self.compiled else why_no_compiler()

    def compile(self) -> None:
        """Compile the shared object if it is missing. Raises CompileError, or UnavailableError without a compiler."""
        compile_source(self.compilable, self.name)

    def load(self) -> ctypes.CDLL:
        """Return the compiled functions. Raises CompileError, OSError, or UnavailableError without a compiler."""
        return opened(lambda: compile_source(self.compilable, self.name), load)


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """Load the library at ``path`` with the threads of torch's OpenMP runtime, if there is one. Raises OSError."""
    library = ctypes.CDLL(str(path))
    library.gemmtune_runtime.argtypes = [ctypes.c_void_p] * len(_OPENMP_ENTRIES)
    library.gemmtune_runtime.restype = None
    library.gemmtune_runtime(*_openmp_entries())
    return library


def _openmp_entries() -> list[int | None]:
    """Return addresses in the OpenMP runtime. Loading by name finds the one that torch loaded, from any folder."""
    none: list[int | None] = [None] * len(_OPENMP_ENTRIES)
    if _process.forked:
        return none
    try:
        runtime = ctypes.CDLL("libgomp.so.1")
        return [ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value for name in _OPENMP_ENTRIES]
    except (OSError, AttributeError):  # torch uses another runtime
        return none


class _Process:
    """Marker of a forked child, which lost the threads of the OpenMP runtime. That runtime would wait for them forever."""

    forked = False

    def mark(self) -> None:
        self.forked = True


_process = _Process()
os.register_at_fork(after_in_child=_process.mark)
