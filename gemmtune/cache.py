"""Cache folder of compiled kernels, locks and the store: the folder of the settings, or a temporary one if necessary."""

from __future__ import annotations

import functools
import os
import stat
import tempfile
import warnings
from pathlib import Path

from .errors import SettingsError
from .settings import current


def cache_dir(*parts: str) -> Path:
    """Return a folder below the cache folder, made if missing.

    If the cache folder is not writable, the folder is below a temporary one, with one warning.

    Raises:
        SettingsError: users other than the owner can write it. Kernels are loaded from there, so they could insert any code.
    """
    path = _writable(current().folder)
    for part in ("", *parts):
        path = path / part
        make_private(path)
        if (problem := why_not_private(path)) is not None:
            raise SettingsError(problem)
    return path


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents for this user alone. An existing folder stays unchanged."""
    if not folder.exists():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def why_not_private(folder: Path) -> str | None:
    """Return the problem and remedy of a folder that users other than its owner can write, else None."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if not mode & 0o022:
        return None
    return (
        f"cache_dir: got {folder}, which others than its owner can write (mode {mode:o}), expected a folder that nobody else can: "
        f"kernels are loaded from it. If you trust what is in it, chmod go-w {folder}; else set cache_dir (GEMMTUNE_CACHE_DIR) to "
        "another folder"
    )


@functools.cache
def _writable(folder: Path) -> Path:
    """Return ``folder`` if it is writable, else a temporary folder that all processes of this user find."""
    try:
        make_private(folder)
        problem = None if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"
    except OSError as error:
        problem = str(error)
    if problem is None:
        return folder
    instead = Path(tempfile.gettempdir()) / f"gemmtune-{os.getuid()}"
    instead.mkdir(mode=0o700, exist_ok=True)
    status = instead.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise SettingsError(
            f"cache_dir: got {folder}, which cannot be used ({problem}), and {instead} is not a folder that only this user can "
            "write; set cache_dir (GEMMTUNE_CACHE_DIR) to a writable folder"
        )
    warnings.warn(
        f"cache_dir: got {folder}, expected a writable folder ({problem}); compiled kernels go to {instead} for "
        "now. Set cache_dir (GEMMTUNE_CACHE_DIR) to another folder.",
        RuntimeWarning,
        stacklevel=3,
    )
    return instead
