"""Locks between processes, and file systems without them."""

import errno
import fcntl
import functools
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from ..warning import warn

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


class _Held(threading.local):
    """Files that this thread has locked."""

    def __init__(self) -> None:
        self.paths: set[Path] = set()


_held = _Held()


@contextmanager
def file_lock(path: Path, timeout_s: float = -1) -> Iterator[None]:
    """Hold the lock on a file. It locks nothing where there are no locks, or if this thread has it already.

    A thread has it already if a signal handler or a finalizer calls what it interrupted.

    ``timeout_s`` limits the wait at its beginning, with filelock.Timeout, an OSError; -1 is no limit. Raises OSError if the file
    cannot be made, for which filelock would wait.
    """
    path.touch()
    if path in _held.paths or not has_locks(path.parent):
        yield
        return
    with filelock.FileLock(path, timeout=timeout_s):
        _held.paths.add(path)
        try:
            yield
        finally:
            _held.paths.remove(path)
