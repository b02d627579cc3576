"""Locks between processes, and file systems without them."""

import errno
import fcntl
import functools
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import filelock

from .warning import warn

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of ``flock`` on a file system without locks."""
_warned: set[int] = set()


NO_LOCKS_WARNING = (
    "locks: got {error} in {folder}, expected a file system with locks. Without them two processes may do the same work, and the "
    "store is not written. Set cache_dir (GEMMTUNE_CACHE_DIR) to a folder on a local file system."
)


def has_locks(folder: Path) -> bool:
    """Return True unless files in the folder cannot be locked, as on some network file systems. Warn once of each of these."""
    try:
        return _has_locks(folder.stat().st_dev, folder)
    except OSError:  # nothing can be made there, so nothing is locked there
        return True


@functools.cache
def _has_locks(device: int, folder: Path) -> bool:
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            if device not in _warned:
                _warned.add(device)
                warn(NO_LOCKS_WARNING.format(error=error, folder=folder))
            return False
    return True


def file_lock(path: Path, timeout_s: float = -1) -> AbstractContextManager[object]:
    """Return the lock on a file, to be used in a ``with`` statement. It locks nothing where there are no locks.

    ``timeout_s`` limits the wait at its beginning, with filelock.Timeout, an OSError; -1 is no limit. Raises OSError if the file
    cannot be made, for which filelock would wait.
    """
    path.touch()
    return filelock.FileLock(path, timeout=timeout_s) if has_locks(path.parent) else nullcontext()
