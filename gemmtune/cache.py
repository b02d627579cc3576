"""The cache folder: compiled kernels, locks and the store, below a folder of the settings or, if need be, a temporary one."""

from __future__ import annotations

import functools
import os
import stat
import tempfile
import warnings
from pathlib import Path

from .errors import SettingsError
from .settings import current

__all__ = ["cache_dir"]


def cache_dir(*parts: str) -> Path:
    """A folder below the cache folder, made if missing; below a temporary folder, with one warning, if that cannot be written."""
    path = _writable(current().folder).joinpath(*parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def _writable(folder: Path) -> Path:
    """``folder`` if files can be made there, else a folder of this user's that all processes of the user find."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = None if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"
    except OSError as error:
        problem = str(error)
    if problem is None:
        return folder
    instead = Path(tempfile.gettempdir()) / f"gemmtune-{os.getuid()}"
    instead.mkdir(mode=0o700, exist_ok=True)
    status = instead.lstat()
    # Kernels are loaded from there: nobody else may have put them in.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise SettingsError(
            f"cache_dir: got {folder}, which cannot be used ({problem}), and {instead} is not a folder that only this user can "
            "write; set cache_dir (GEMMTUNE_CACHE_DIR) to a folder that can be written"
        )
    warnings.warn(
        f"cache_dir: got {folder}, expected a folder that can be written ({problem}); compiled kernels go to {instead} for "
        "now. Set cache_dir (GEMMTUNE_CACHE_DIR) to another folder.",
        RuntimeWarning,
        stacklevel=3,
    )
    return instead
