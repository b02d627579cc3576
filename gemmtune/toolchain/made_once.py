"""Compiled files in the cache folder: content-addressed, and compiled once for all processes that need them."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ..cache import cache_dir, cached, present, refuse
from ..cache.locking import file_lock
from ..errors import CompileError, UnavailableError
from .tool import run_tool

T = TypeVar("T")

ELF_MAGIC = b"\x7fELF"
ELF_HEADER_BYTES = 64
LEFTOVER_S = 86400.0
"""Age at which a temporary folder is taken for one of a process that was killed. No compilation takes so long."""

DAMAGED = (200, 209, 218, 300, 500)
"""Errors of CUDA's driver and of HIP, which share numbers, for code that is damaged or for another GPU, or lacks the kernel."""


class DamagedError(UnavailableError):
    """Refusal of a driver to load a compiled file."""


def made_once(file: Sequence[str], make: Callable[[Path], None], name: str, *, quietly: bool = False) -> Path:
    """Return the path ``cached(*file)``. If it is missing or unusable, one process lets ``make(path)`` write it under another name.

    ``quietly`` is that of ``cache_dir``. Raises CompileError for ``name`` if the cache folder is unusable, what ``make`` raises,
    and UnavailableError if there is no folder for a new file.
    """
    path = cached(*file)
    if present(path):
        return path
    *folders, last = file
    try:
        path = cache_dir(*folders, quietly=quietly) / last
        with file_lock(path.with_suffix(".lock")):
            if not present(path):
                _remove_leftovers(path.parent)
                with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                    made = Path(folder) / last
                    make(made)
                    made.chmod(made.stat().st_mode & ~0o022)  # ``present`` accepts no file that others can write
                    os.replace(made, path)
    except OSError as error:
        raise CompileError(
            name, f"the cache folder cannot be used: {error}; set GEMMTUNE_CACHE_DIR to a folder of yours"
        ) from error
    return path


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary folders of compilations that were killed. Folders of others may vanish at the same time."""
    before = time.time() - LEFTOVER_S
    for old in folder.glob(f"{tempfile.gettempprefix()}*"):
        with contextlib.suppress(FileNotFoundError):
            if old.stat().st_mtime < before:
                shutil.rmtree(old, ignore_errors=True)


def compile_text(command: Sequence[str], text: str, suffix: str, made: Path, name: str, *, timeout_s: float | None = None) -> None:
    """Run a compiler as ``command source -o made``, where the file ``source`` next to ``made`` holds ``text``.

    Raises CompileError for ``name``, with the output, if it rejects the text or does not end within ``timeout_s``.
    """
    source = made.with_suffix(suffix)
    source.write_text(text, encoding="utf-8")
    try:
        finished = run_tool([*command, str(source), "-o", str(made)], timeout_s=timeout_s)
    except TimeoutError as error:
        raise CompileError(name, str(error)) from error
    if finished.returncode != 0 or not made.exists():
        said = finished.stderr or finished.stdout
        raise CompileError(name, said or f"{command[0]} ended with {finished.returncode}, expected 0 and a file")


def opened(make: Callable[[], Path], load: Callable[[Path], T]) -> T:
    """Return ``load(path)`` of the file from ``make``. Let a file that cannot be loaded be made anew, once.

    Raises OSError if the new file cannot be loaded either (DamagedError: a driver refuses it), UnavailableError if it cannot be
    made.
    """
    path = make()
    try:
        return _loaded(path, load)
    except (OSError, DamagedError) as error:
        refuse(path)
        first = error
    try:
        return _loaded(make(), load)
    except UnavailableError as error:
        if isinstance(error, DamagedError):
            raise
        raise UnavailableError(f"{path} cannot be loaded ({first}) and not be made anew: {error}") from first


def _loaded(path: Path, load: Callable[[Path], T]) -> T:
    require_whole(path)
    try:
        return load(path)
    except AttributeError as error:  # of ctypes: the library lacks a function
        raise OSError(str(error)) from error


def require_whole(path: Path) -> None:
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
