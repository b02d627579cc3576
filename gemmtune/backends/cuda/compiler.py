"""Shared objects out of sources: content-addressed files in the cache folder, compiled once by nvcc."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

from ...cache import cache_dir
from ...toolchain.made_once import compile_text, made_once
from ...toolchain.nvcc import find_compiler

__all__ = ["CAPABILITY", "Source", "artifact_path", "compile_source"]

CAPABILITY = 90
"""The compute capability whose own instructions the kernels have."""
FLAGS = (
    "-std=c++17", "-O3", "-DNDEBUG", "-shared", "-Xcompiler", "-fPIC", "-w",
    f"-gencode=arch=compute_{CAPABILITY}a,code=sm_{CAPABILITY}a",
)  # fmt: skip


class Source(Protocol):
    """A translation unit with a plain C entry point, and a hash over everything that makes its text."""

    @property
    def text(self) -> str: ...

    @property
    def digest(self) -> str: ...


def artifact_path(source: Source) -> Path:
    """Where the shared object is or will be. Not named by the compiler: what another machine's nvcc made is used as it is."""
    digest = hashlib.blake2b("\n".join((source.digest, *FLAGS)).encode(), digest_size=16).hexdigest()
    return cache_dir("cuda") / f"{digest}.so"


def compile_source(source: Source, name: str) -> Path:
    """The shared object of ``source``, made if it is missing. Of several processes that need it, one compiles.

    Raises:
        CompileError: nvcc refused the source, or the cache folder cannot be written.
        UnavailableError: it is missing, and there is no nvcc.
    """
    return made_once(
        lambda: artifact_path(source),
        lambda made: compile_text([find_compiler().path, *FLAGS], source.text, ".cu", made, name),
        name,
    )
