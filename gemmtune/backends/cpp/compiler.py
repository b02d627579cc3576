"""The system's C++ compiler and its shared objects, which are content-addressed files in the cache folder."""

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
"""Compiler names to look for on PATH, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """Compiler of this machine. ``version`` is the first line of ``--version``."""

    path: str
    version: str


class Compilable(Protocol):
    """Source that can be compiled."""

    @property
    def text(self) -> str:
        """C++ source."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags."""

    @property
    def digest(self) -> str:
        """Hash of source and flags."""


def find_compiler() -> Compiler | None:
    """Return the first of COMPILERS that exists and prints its version; None if there is none."""
    for name in COMPILERS:
        path = shutil.which(name)
        version = _version(path, os.stat(path).st_mtime_ns) if path else None
        if path and version:
            return Compiler(path=path, version=version)
    return None


@functools.cache
def _version(path: str, modified_ns: int) -> str | None:  # noqa: ARG001 - a replaced compiler needs a new look-up
    try:
        printed = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return (printed.splitlines() or [path])[0]


def artifact_path(source: Compilable, compiler: Compiler) -> Path:
    """Return the path of the shared object for ``source``, whether it exists or not."""
    digest = hashlib.blake2b(f"{compiler.version}\n{source.digest}".encode(), digest_size=16).hexdigest()
    return cache_dir("cpp") / f"{digest}.so"


def compile_source(source: Compilable, name: str) -> Path:
    """Return the shared object of ``source``, compiled if missing. If several processes need it, one compiles.

    ``name`` identifies the choice in a CompileError.

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
