"""The system's C++ compiler and its shared objects, which are content-addressed files in the cache folder."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from ...cache import cached, why_nothing_new
from ...errors import GemmtuneError, UnavailableError
from ...settings import named_compiler
from ...toolchain.made_once import compile_text, made_once, opened
from ...toolchain.tool import version_text
from ...warning import warn

FOLDER, TRIALS = "cpp", "trials"
TRIAL = 'extern "C" void gemmtune_trial() {}\n'
TRIAL_TIMEOUT_S = 20.0

COMPILERS = ("c++", "g++", "clang++")
"""Compiler names to look for on PATH, in this order, after the program that ``CXX`` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """Compiler of this machine. ``version`` is the first line of ``--version``."""

    path: str
    version: str


class Compilable(ABC):
    """Source that can be compiled."""

    @property
    @abstractmethod
    def text(self) -> str:
        """C++ source."""

    @property
    @abstractmethod
    def flags(self) -> tuple[str, ...]:
        """Compiler flags."""

    @property
    def digest(self) -> str:
        return _digest(self)


@functools.lru_cache(maxsize=1024)
def _digest(source: Compilable) -> str:
    return hashlib.blake2b("\n".join((*source.flags, source.text)).encode(), digest_size=16).hexdigest()


def names() -> tuple[str, ...]:
    """Return the names or paths of compilers to look for: that of the environment variable ``CXX``, if it is set, and COMPILERS."""
    return tuple(filter(None, (named_compiler(), *COMPILERS)))


def find_compiler() -> Compiler | None:
    """Return the first compiler of ``names`` that exists and prints its version; None if there is none."""
    return _search()[0]


def _search() -> tuple[Compiler | None, str]:
    """Return the compiler, and why the first one on PATH before it does not run, or ""."""
    broken = ""
    for name in names():
        path = shutil.which(name)
        if path is None:
            continue
        try:
            return Compiler(path=path, version=(version_text(path).splitlines() or [path])[0]), broken
        except UnavailableError as error:
            broken = broken or str(error)
    return None, broken


def why_no_compiler() -> str | None:
    """Return why nothing can be compiled here, with a remedy. None if the compiler made a library that can be loaded."""
    compiler, broken = _search()
    if compiler is None and broken:
        return f"{broken}; repair it, or put another compiler first on PATH"
    if compiler is None:
        return f"no C++ compiler on PATH ({', '.join(names())}); install g++ or clang++"
    digest = hashlib.blake2b(f"{compiler}{os.stat(compiler.path).st_mtime_ns}".encode(), digest_size=16).hexdigest()
    return why_nothing_new(TRIALS) or _why_broken(compiler, cached(TRIALS, f"{digest}.so"))


@functools.cache
def _why_broken(compiler: Compiler, path: Path) -> str | None:
    """Return why the compiler makes no library that can be loaded from ``path``, after one warning; None if it does."""
    name = f"a trial of {compiler.path}"

    def make(made: Path) -> None:
        compile_text([compiler.path, "-shared", "-fPIC"], TRIAL, ".cpp", made, name, timeout_s=TRIAL_TIMEOUT_S)

    try:
        opened(
            lambda: made_once((TRIALS, path.name), make, name, quietly=True),
            lambda library: ctypes.CDLL(str(library)).gemmtune_trial,
        )
    except (GemmtuneError, OSError) as error:
        reason = f"{compiler.path} makes no library that can be loaded: {error}; repair it, or put another compiler first on PATH"
        warn(f"{reason}. Until then torch runs where no compiled kernel is in the cache.")
        return reason
    return None


def artifact_file(source: Compilable) -> tuple[str, ...]:
    """Return the place of the shared object in the cache. The compiler is not in its name: all machines share the artifact."""
    digest = hashlib.blake2b(f"{platform.machine()}\n{source.digest}".encode(), digest_size=16).hexdigest()
    return FOLDER, f"{digest}.so"


def compile_source(source: Compilable, name: str) -> Path:
    """Return the shared object of ``source`` for the choice ``name``. If several processes need to compile it, one does.

    Raises CompileError if the compiler refuses or nothing can be written, UnavailableError if there is no compiler.
    """

    def make(made: Path) -> None:
        compiler = find_compiler()
        if compiler is None:
            raise UnavailableError(f"{name}: {why_no_compiler()}")
        compile_text([compiler.path, *source.flags], source.text, ".cpp", made, name)

    return made_once(artifact_file(source), make, name)
