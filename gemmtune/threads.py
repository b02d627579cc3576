"""Threads for work that a compilation or a capture of the caller must not see."""

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_a_thread(work: Callable[[], T]) -> T:
    """Run ``work`` to its end in a new thread. Return its result, or raise what it raises.

    torch's state of the caller's thread, such as its modes and its memory pool, does not apply there.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="gemmtune-tuning")
    done = pool.submit(contextvars.copy_context().run, work)
    pool.shutdown(wait=False)
    return done.result()
