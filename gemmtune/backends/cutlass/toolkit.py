"""Where CUTLASS is on this machine: the nvidia-cutlass package or a checkout."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import UnavailableError

__all__ = ["Toolkit", "find_toolkit"]

VERSION_HEADER = "cutlass/version.h"


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
