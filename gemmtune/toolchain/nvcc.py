"""The CUDA toolkit's compiler, nvcc, on this machine."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..errors import UnavailableError

LEAST_CUDA = (12, 3)
"""The first CUDA version that compiles our kernels for SM90."""
WHERE_NVCC = ("/usr/local/cuda/bin/nvcc",)
"""Paths searched after PATH."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """nvcc on this machine. ``cuda`` is its CUDA version, such as ``13.0``."""

    path: str
    cuda: str
    version: str


def find_compiler() -> Compiler:
    """Return nvcc from PATH or its usual place.

    Raises:
        UnavailableError: there is none, it does not run, or it is too old.
    """
    for candidate in (shutil.which("nvcc"), *WHERE_NVCC):
        if candidate and os.access(candidate, os.X_OK):
            return _compiler(candidate, os.stat(candidate).st_mtime_ns)
    raise UnavailableError("nvcc is not on PATH: install the CUDA toolkit, or compile on a machine that has it (gemmtune build)")


def toolkit_folders() -> list[Path]:
    """Return the folders above each nvcc, which may be CUDA toolkits."""
    return [Path(nvcc).resolve().parent.parent for nvcc in (shutil.which("nvcc"), *WHERE_NVCC) if nvcc]


@functools.cache
def _compiler(path: str, modified_ns: int) -> Compiler:  # noqa: ARG001 - cache key: a replaced compiler is queried again
    try:
        printed = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"{path} does not run: {error}") from error
    found = re.search(r"release (\d+)\.(\d+)", printed)
    if found is None:
        raise UnavailableError(f"{path} --version: got {printed!r}, expected a release number")
    if (int(found[1]), int(found[2])) < LEAST_CUDA:
        needed = ".".join(map(str, LEAST_CUDA))
        raise UnavailableError(f"{path}: got CUDA {found[1]}.{found[2]}, expected {needed} or newer")
    return Compiler(path=path, cuda=f"{found[1]}.{found[2]}", version=printed.strip().splitlines()[-1])
