"""Shared objects out of sources: content-addressed files in the cache folder, compiled once by nvcc."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...cache import cache_dir
from ..made_once import compile_text, made_once
from ..nvcc import find_compiler
from .source import FLAGS, Source

__all__ = ["artifact_path", "compile_source"]


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
