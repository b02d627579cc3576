"""Where CUTLASS and nvcc are on this machine: the nvidia-cutlass package or a checkout, and the CUDA toolkit's compiler."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ...errors import UnavailableError

__all__ = ["Compiler", "Toolkit", "find_compiler", "find_toolkit"]

VERSION_HEADER = "cutlass/version.h"
LEAST_CUDA = (12, 3)
"""The first CUDA version whose nvcc compiles CUTLASS 4 for SM90."""
WHERE_NVCC = ("/usr/local/cuda/bin/nvcc",)
"""Looked at after PATH."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolkit:
    """A copy of CUTLASS. ``package`` is the folder to put on PYTHONPATH for ``cutlass_library``."""

    version: str
    package: Path
    include: tuple[Path, ...]

    @property
    def digest(self) -> str:
        """A short hash of the version and the place: another copy is another toolkit."""
        return hashlib.blake2b(f"{self.version} {self.package}".encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """nvcc. ``cuda`` is its version such as ``13.0``."""

    path: str
    cuda: str
    version: str


def find_toolkit(checkout: str | None) -> Toolkit:
    """The checkout that ``settings.cutlass_dir`` names, else the installed package.

    Raises:
        UnavailableError: there is none, with what to install; or ``cutlass_dir`` is no checkout.
    """
    if checkout is not None:
        folder = Path(checkout)
        return _toolkit(folder, folder / "python", f"cutlass_dir: got {checkout!r}, expected a checkout of CUTLASS")
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or spec.origin is None:
        raise UnavailableError("CUTLASS is not installed: pip install 'gemmtune[cutlass]', or set cutlass_dir to a checkout")
    package = Path(spec.origin).parent
    return _toolkit(package / "source", package.parent, f"the package at {package} is no whole nvidia-cutlass")


@functools.cache
def _toolkit(source: Path, package: Path, complaint: str) -> Toolkit:
    header = source / "include" / VERSION_HEADER
    if not header.is_file() or not (package / "cutlass_library").is_dir():
        missing = header if not header.is_file() else package / "cutlass_library"
        raise UnavailableError(f"{complaint}: {missing} is missing")
    numbers = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH) (\d+)", header.read_text()))
    version = ".".join(numbers.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))
    return Toolkit(version=version, package=package, include=(source / "include", source / "tools" / "util" / "include"))


def find_compiler() -> Compiler:
    """nvcc on PATH or at its usual place.

    Raises:
        UnavailableError: there is none, it does not run, or it is too old.
    """
    for candidate in (shutil.which("nvcc"), *WHERE_NVCC):
        if candidate and os.access(candidate, os.X_OK):
            return _compiler(candidate, os.stat(candidate).st_mtime_ns)
    raise UnavailableError("nvcc is not on PATH: install the CUDA toolkit, or compile on a machine that has it (gemmtune build)")


@functools.cache
def _compiler(path: str, modified_ns: int) -> Compiler:  # noqa: ARG001 - a replaced compiler is asked again
    try:
        printed = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"{path} does not run: {error}") from error
    found = re.search(r"release (\d+)\.(\d+)", printed)
    if found is None:
        raise UnavailableError(f"{path} --version: got {printed!r}, expected a release number")
    if (int(found[1]), int(found[2])) < LEAST_CUDA:
        needed = ".".join(map(str, LEAST_CUDA))
        raise UnavailableError(f"{path}: got CUDA {found[1]}.{found[2]}, expected {needed} or newer for CUTLASS")
    return Compiler(path=path, cuda=f"{found[1]}.{found[2]}", version=printed.strip().splitlines()[-1])
