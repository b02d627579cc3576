"""The CUDA toolkit's compiler, nvcc, on this machine."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..errors import UnavailableError
from .tool import version_text

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
    """Return nvcc from PATH or its usual place. Raises UnavailableError if it is missing, broken or too old."""
    for candidate in (shutil.which("nvcc"), *WHERE_NVCC):
        if candidate and os.access(candidate, os.X_OK):
            return _compiler(candidate, version_text(candidate))
    raise UnavailableError("nvcc is not on PATH: install the CUDA toolkit, or compile on a machine that has it (gemmtune build)")


def toolkit_folders() -> list[Path]:
    """Return the folders above each nvcc, which may be CUDA toolkits."""
    return [Path(nvcc).resolve().parent.parent for nvcc in (shutil.which("nvcc"), *WHERE_NVCC) if nvcc]


def _compiler(path: str, printed: str) -> Compiler:
    found = re.search(r"release (\d+)\.(\d+)", printed)
    if found is None:
        raise UnavailableError(f"{path} --version: got {printed!r}, expected a release number")
    if (int(found[1]), int(found[2])) < LEAST_CUDA:
        needed = ".".join(map(str, LEAST_CUDA))
        raise UnavailableError(f"{path}: got CUDA {found[1]}.{found[2]}, expected {needed} or newer")
    return Compiler(path=path, cuda=f"{found[1]}.{found[2]}", version=printed.strip().splitlines()[-1])
