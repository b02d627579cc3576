"""Shared objects out of sources: content-addressed files in the cache folder, compiled once by nvcc."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...cache import cache_dir
from ...toolchain.made_once import compile_text, made_once
from ...toolchain.nvcc import find_compiler
from .source import Source, flags
from .toolkit import Toolkit

__all__ = ["artifact_path", "compile_source"]


def artifact_path(source: Source, toolkit: Toolkit, capability: int) -> Path:
    """The file of the shared object, made or not. Not named by the compiler: what another machine's nvcc made is used as it is."""
    parts = (source.digest, toolkit.version, *flags(source.operation, capability))
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
    return cache_dir("cutlass") / f"{digest}.so"


def compile_source(source: Source, toolkit: Toolkit, capability: int, name: str) -> Path:
    """The shared object of ``source``, made if it is missing. Of several processes that need it, one compiles.

    Raises:
        CompileError: nvcc refused the source, or the cache folder cannot be written.
        UnavailableError: it is missing, and there is no nvcc.
    """

    def make(made: Path) -> None:
        includes = [f"-I{include}" for include in toolkit.include]
        command = [find_compiler().path, *flags(source.operation, capability), *includes]
        compile_text(command, source.text, ".cu", made, name)

    return made_once(lambda: artifact_path(source, toolkit, capability), make, name)
