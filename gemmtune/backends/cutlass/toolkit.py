"""Location of CUTLASS, a package or a checkout, and the operations that its generator lists once and the cache keeps."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...cache import cache_dir, cached, present, write_once
from ...errors import UnavailableError
from .operation import Operation
from .tiles import own_operations

VERSION_HEADER = "cutlass/version.h"
LISTING = Path(__file__).with_name("listing.py")
TIMEOUT_S = 120.0
CUDA = "13.0"
"""CUDA version passed to the generator. Newer versions only add operations, and enumeration must not depend on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolkit:
    """Copy of CUTLASS. ``package`` is the folder to put on PYTHONPATH for ``cutlass_library``."""

    version: str
    package: Path
    include: tuple[Path, ...]

    @property
    def digest(self) -> str:
        """Short hash of version and path: another copy is another toolkit."""
        return hashlib.blake2b(f"{self.version} {self.package}".encode(), digest_size=8).hexdigest()


def find_toolkit(checkout: str | None) -> Toolkit:
    """Return the checkout of ``settings.cutlass_dir``, or the installed package. Raises UnavailableError with the remedy."""
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
    numbers = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH) (\d+)", header.read_text(encoding="utf-8", errors="replace")))
    version = ".".join(numbers.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))
    return Toolkit(version=version, package=package, include=(source / "include", source / "tools" / "util" / "include"))


@functools.lru_cache(maxsize=32)
def operations(toolkit: Toolkit, capability: int, element: str) -> tuple[Operation, ...]:
    """Return the operations of ``element`` for ``capability``, the generator's first. Raises UnavailableError if that fails."""
    program = hashlib.blake2b(LISTING.read_bytes(), digest_size=8).hexdigest()
    name = f"operations-{toolkit.digest}-{program}-sm{capability}-{element}.json"
    path = cached("cutlass", name)
    try:
        plain = json.loads(path.read_text(encoding="utf-8") if present(path) else "")
    except ValueError:  # missing or damaged
        text = _listed(toolkit, capability, element)
        plain = json.loads(text)
        with contextlib.suppress(OSError, UnavailableError):  # the next process lists them again
            write_once(cache_dir("cutlass", quietly=True) / name, text)
    listed = [Operation.of(values) for values in plain]
    names = {op.name for op in listed}
    return tuple(listed + [op for op in own_operations(listed) if op.name not in names])


@functools.lru_cache(maxsize=32)
def distinct_operations(toolkit: Toolkit, capability: int, element: str) -> tuple[Operation, ...]:
    """Return ``operations`` filtered by ``without_twins``. Raises UnavailableError."""
    return tuple(without_twins(operations(toolkit, capability, element)))


def without_twins(found: Iterable[Operation]) -> list[Operation]:
    """Return one operation of each group with the same kernel. The type of c is never read and does not matter."""
    kept: dict[Operation, Operation] = {}
    for op in sorted(found, key=lambda op: op.c != "void"):
        kept.setdefault(dataclasses.replace(op, name="", c=""), op)
    return list(kept.values())


def _listed(toolkit: Toolkit, capability: int, element: str) -> str:
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(toolkit.package)!r}); runpy.run_path({str(LISTING)!r}, run_name='__main__')"
    )
    command = [sys.executable, "-P", "-c", program, str(capability), element, CUDA]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        tail = "\n".join(error.stderr.strip().splitlines()[-5:])
        raise UnavailableError(f"the generator of CUTLASS {toolkit.version} at {toolkit.package} failed:\n{tail}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"the generator of CUTLASS {toolkit.version} at {toolkit.package}: {error}") from error
    return done.stdout
