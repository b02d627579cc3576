"""Work in the middle of a compilation or a capture that these must not see."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["in_a_thread"]


def in_a_thread(work: Callable[[], Any]) -> None:
    """Do work to its end in a thread of its own.

    What torch keeps for a thread, such as modes and the pool that it allocates from, is not that of the caller there.
    """
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            raised.append(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=lambda: context.run(guarded), name="gemmtune-tuning")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
