"""Compiled files in the cache folder: content-addressed, and compiled once for all processes that need them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from ..errors import CompileError

T = TypeVar("T")

ELF_MAGIC = b"\x7fELF"
ELF_HEADER_BYTES = 64


def made_once(path_of: Callable[[], Path], make: Callable[[Path], None], name: str) -> Path:
    """Return the file at ``path_of()``. If it is missing, one process lets ``make(path)`` write it to a temporary folder.

    Raises:
        CompileError: for ``name``: the cache folder is unusable. Exceptions of ``make`` propagate.
    """
    try:
        path = path_of()
        if path.exists():
            return path
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                    made = Path(folder) / path.name
                    make(made)
                    os.replace(made, path)
    except OSError as error:
        raise CompileError(
            name, f"the cache folder cannot be used: {error}; set GEMMTUNE_CACHE_DIR to a folder of yours"
        ) from error
    return path


def compile_text(command: Sequence[str], text: str, suffix: str, made: Path, name: str) -> None:
    """Run a compiler as ``command source -o made``, where the file ``source`` next to ``made`` holds ``text``.

    Raises:
        CompileError: for ``name``: the compiler rejected the text. It contains the compiler's output.
    """
    source = made.with_suffix(suffix)
    source.write_text(text)
    finished = subprocess.run([*command, str(source), "-o", str(made)], capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise CompileError(name, finished.stderr or finished.stdout or f"{command[0]} ended with {finished.returncode}")


def opened(make: Callable[[], Path], load: Callable[[Path], T]) -> T:
    """Return ``load(path)`` of the file from ``make``. Delete a damaged file and make it again, once.

    Raises:
        OSError: the new file cannot be loaded either.
    """
    path = make()
    try:
        _require_whole(path)
        return load(path)
    except OSError:
        path.unlink(missing_ok=True)
    return load(make())


def _require_whole(path: Path) -> None:
    """Raise OSError for a truncated file: the process would die when it reads the missing pages."""
    with path.open("rb") as file:
        header = file.read(ELF_HEADER_BYTES)
    if len(header) < ELF_HEADER_BYTES or not header.startswith(ELF_MAGIC):
        raise OSError(f"{path}: got another format, expected an ELF file")
    # Linkers write the table of sections last. Its offset, entry size and entry count give the file size (elf(5)).
    start, entry_bytes, entries = (int.from_bytes(header[i:j], "little") for i, j in ((40, 48), (58, 60), (60, 62)))
    got, expected = path.stat().st_size, start + entry_bytes * entries
    if got < expected:
        raise OSError(f"{path} has {got} bytes, expected {expected}")
