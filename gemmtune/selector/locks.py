"""Locks between processes, so that a process waits for the result of another one that tunes the same problem."""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator

import filelock

from ..cache import cache_dir
from ..cache.locking import file_lock
from ..errors import UnavailableError
from ..settings import Settings

log = logging.getLogger("gemmtune")


@contextlib.contextmanager
def tuning_lock(settings: Settings, key: str, fingerprint: str, on_wait: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold the right to tune a problem (``Problem.key``) on a machine (``key.fingerprint_text``).

    Waits while another process or thread holds it, after one INFO line and a call of ``on_wait``. Yields True if it waited,
    because the store then probably has the answer. The system releases the lock of a process that dies. Where nothing can be
    locked there is no lock. At worst two processes then measure the same problem.
    """
    name = hashlib.blake2b(f"{key}\n{fingerprint}".encode(), digest_size=16).hexdigest()
    with contextlib.ExitStack() as stack:
        waited = False
        try:
            path = cache_dir("locks", quietly=True, settings=settings) / f"{name}.lock"
            try:
                stack.enter_context(file_lock(path, 0))
            except filelock.Timeout:
                log.info("another process tunes this problem: waiting for its answer (%s)", path)
                if on_wait is not None:
                    on_wait()
                stack.enter_context(file_lock(path))
                waited = True
        except (OSError, UnavailableError) as error:
            log.debug("cannot lock the problem, tuning without: %s", error)
        yield waited
