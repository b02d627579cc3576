"""Locks between processes, so that a process waits for the result of another one that tunes the same problem."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from ..cache import make_private
from ..settings import Settings

log = logging.getLogger("gemmtune")

_warned: set[Path] = set()


@contextmanager
def tuning_lock(settings: Settings, key: str, fingerprint: str, on_wait: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold the right to tune a problem (``Problem.key``) on a machine (``key.fingerprint_text``).

    Waits while another process or thread holds it, after one INFO line and a call of ``on_wait``. Yields True if it waited,
    because the store then probably has the answer. The system releases the lock of a process that dies. If the folder does
    not support locks there is one warning and no lock. At worst two processes then measure the same problem.
    """
    folder = settings.folder / "locks"
    name = hashlib.blake2b(f"{key}\n{fingerprint}".encode(), digest_size=16).hexdigest()
    lock = filelock.FileLock(folder / f"{name}.lock")
    try:
        waited = _acquire(lock, folder, on_wait)
    except (OSError, NotImplementedError) as error:
        if folder not in _warned:
            _warned.add(folder)
            warnings.warn(
                f"locks: got {error} in {folder}, expected a folder that supports lock files. Give this user permission to write "
                "it, or set cache_dir (GEMMTUNE_CACHE_DIR) to another folder. Until then two processes may tune the same problem "
                "concurrently.",
                RuntimeWarning,
                stacklevel=4,
            )
        yield False
        return
    try:
        yield waited
    finally:
        lock.release()


def _acquire(lock: filelock.BaseFileLock, folder: Path, on_wait: Callable[[], None] | None) -> bool:
    make_private(folder)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        log.info("another process tunes this problem: waiting for its answer (%s)", lock.lock_file)
        if on_wait is not None:
            on_wait()
        lock.acquire()
        return True
    return False
