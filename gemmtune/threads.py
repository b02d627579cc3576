"""Threads for work that a compilation or a capture of the caller must not see."""

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_a_thread(work: Callable[[], T]) -> T:
    """Run ``work`` to its end in a new thread. Return its result, or raise what it raises.

    torch's state of the caller's thread, such as its modes and its memory pool, does not apply there. A pool of threads would
    refuse the work once the main thread has ended.
    """
    done: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            done.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - the caller gets it, whatever it is
            done.set_exception(error)

    threading.Thread(target=run, name="gemmtune-tuning").start()
    return done.result()
