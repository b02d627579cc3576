"""Folders of a process for untrusted code."""

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

import platformdirs


def alone(parent: Path) -> Mapping[str, str]:
    """Return variables of the environment that name one new folder, in which all is written."""
    folder = tempfile.mkdtemp(dir=parent)
    return dict.fromkeys(("HOME", "TMPDIR", "PWD"), folder)


IN_USE = {"TMPDIR": "files", "PWD": "work"}
"""Names of the folders in the home of a program."""


def left_in(home: Path) -> list[Path]:
    """Return what a program has left in its home, besides these folders. The folder of another process is no home."""
    if not all((home / name).is_dir() for name in IN_USE.values()):
        return []
    return sorted(path for path in home.iterdir() if path.name not in IN_USE.values())


def as_in_use() -> Mapping[str, str]:
    """Return these variables with new folders as programs have them, beside files of this user and not among temporary ones.

    Raises:
        OSError: none can be made there.
    """
    home = Path(tempfile.mkdtemp(prefix="run", dir=platformdirs.user_cache_path(ensure_exists=True)))
    folders = {"HOME": home} | {variable: home / name for variable, name in IN_USE.items()}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    return {name: str(folder) for name, folder in folders.items()}


def emptied(folder: Path) -> None:
    """Remove a folder with all that can be removed."""
    for path in sorted(folder.rglob("*"), reverse=True):
        with contextlib.suppress(OSError):
            path.unlink() if path.is_symlink() or not path.is_dir() else path.rmdir()
    with contextlib.suppress(OSError):
        folder.rmdir()
