"""Clock of a judgement. It stands still while processes are made, whose imports may compile for long."""

import contextlib
import time
from collections.abc import Iterator

_stood: list[float] = [0.0]
_begun: list[float] = []


def now_s() -> float:
    """Return the seconds of the clock."""
    return (_begun[0] if _begun else time.monotonic()) - _stood[0]


@contextlib.contextmanager
def stopped() -> Iterator[None]:
    """Stop the clock."""
    _begun.append(time.monotonic())
    try:
        yield
    finally:
        begun = _begun.pop()
        if not _begun:
            _stood[0] += time.monotonic() - begun
