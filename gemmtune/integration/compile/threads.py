"""Threads for work that a compilation or a capture of the caller must not see."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["in_a_thread"]


def in_a_thread(work: Callable[[], Any]) -> None:
    """Run ``work`` to its end in a new thread, and raise what it raises.

    torch's state of the caller's thread, such as its modes and its memory pool, does not apply there.
    """
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            raised.append(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=lambda: context.run(guarded), name="gemmtune-tuning")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
