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


def as_in_use() -> Mapping[str, str]:
    """Return these variables with new folders as programs have them, beside files of this user and not among temporary ones.

    Raises:
        OSError: none can be made there.
    """
    home = Path(tempfile.mkdtemp(prefix="run", dir=platformdirs.user_cache_path(ensure_exists=True)))
    folders = {"HOME": home, "TMPDIR": home / "files", "PWD": home / "work"}
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
