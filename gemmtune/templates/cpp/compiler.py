"""The system's C++ compiler, and the shared objects that it made: content-addressed files in the cache folder."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from ...errors import CompileError, UnavailableError
from ...settings import cache_dir
from .source import Source, flags

__all__ = ["COMPILERS", "Compiler", "artifact_path", "compile_source", "find_compiler"]

COMPILERS = ("c++", "g++", "clang++")
"""Names that are looked for on PATH, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A compiler of this machine. ``version`` is the first line that ``--version`` prints."""

    path: str
    version: str


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


def artifact_path(source: Source, compiler: Compiler) -> Path:
    """Where the shared object of ``source`` is or will be."""
    digest = hashlib.blake2b(f"{compiler.version}\n{source.digest}".encode(), digest_size=16).hexdigest()
    return cache_dir("cpp") / f"{digest}.so"


def compile_source(source: Source, name: str) -> Path:
    """The shared object of ``source``, made if it is missing. Of several processes that need it, one compiles.

    ``name`` is what a CompileError is said of.

    Raises:
        CompileError: the compiler refused the source, or the cache folder cannot be written.
        UnavailableError: there is no compiler.
    """
    compiler = find_compiler()
    if compiler is None:
        raise UnavailableError(f"{name}: no C++ compiler on PATH, expected one of {', '.join(COMPILERS)}; install g++ or clang++")
    try:
        path = artifact_path(source, compiler)
        if path.exists():
            return path
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                _compile(source, compiler, path, name)
    except OSError as error:
        raise CompileError(
            name, f"the cache folder cannot be used: {error}; set GEMMTUNE_CACHE_DIR to a folder of yours"
        ) from error
    return path


def _compile(source: Source, compiler: Compiler, path: Path, name: str) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        text, made = Path(folder) / "gemm.cpp", Path(folder) / "gemm.so"
        text.write_text(source.text)
        command = [compiler.path, *flags(source.arch), str(text), "-o", str(made)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            raise CompileError(name, finished.stderr or finished.stdout or f"{compiler.path} ended with {finished.returncode}")
        os.replace(made, path)
