"""The system's C++ compiler, and the shared objects that it made: content-addressed files in the cache folder."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...cache import cache_dir
from ...errors import UnavailableError
from ...toolchain.made_once import compile_text, made_once

COMPILERS = ("c++", "g++", "clang++")
"""Names that are looked for on PATH, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A compiler of this machine. ``version`` is the first line that ``--version`` prints."""

    path: str
    version: str


class Compilable(Protocol):
    """What has to be compiled."""

    @property
    def text(self) -> str:
        """The C++ source."""

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler's flags."""

    @property
    def digest(self) -> str:
        """A hash over both."""


def find_compiler() -> Compiler | None:
    """The first of COMPILERS that is here and says its version; None if there is none."""
    for name in COMPILERS:
        path = shutil.which(name)
        version = _version(path, os.stat(path).st_mtime_ns) if path else None
        if path and version:
            return Compiler(path=path, version=version)
    return None


@functools.cache
def _version(path: str, modified_ns: int) -> str | None:  # noqa: ARG001 - a replaced compiler is asked again
    try:
        printed = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return (printed.splitlines() or [path])[0]


def artifact_path(source: Compilable, compiler: Compiler) -> Path:
    """The file of the shared object of ``source``, made or not."""
    digest = hashlib.blake2b(f"{compiler.version}\n{source.digest}".encode(), digest_size=16).hexdigest()
    return cache_dir("cpp") / f"{digest}.so"


def compile_source(source: Compilable, name: str) -> Path:
    """The shared object of ``source``, made if it is missing. Of several processes that need it, one compiles.

    ``name`` is what a CompileError is said of.

    Raises:
        CompileError: the compiler refused the source, or the cache folder cannot be written.
        UnavailableError: there is no compiler.
    """
    compiler = find_compiler()
    if compiler is None:
        raise UnavailableError(f"{name}: no C++ compiler on PATH, expected one of {', '.join(COMPILERS)}; install g++ or clang++")
    command = [compiler.path, *source.flags]
    return made_once(
        lambda: artifact_path(source, compiler), lambda made: compile_text(command, source.text, ".cpp", made, name), name
    )
