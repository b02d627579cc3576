"""Clocks of a judgement and of a call. The former stands still while processes are made: an import may compile for long."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Clock of the latest call: from the moment when its operands were handed over until its result was read."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    device_us: float = 0.0
    """Time between two events of the GEMM's stream, as its process reports it, or 0 on a CPU."""


_stood = [0.0]


def now_s() -> float:
    """Return the seconds of the clock."""
    return time.monotonic() - _stood[0]


@contextlib.contextmanager
def stopped() -> Iterator[None]:
    """Stop the clock."""
    begun = time.monotonic()
    try:
        yield
    finally:
        _stood[0] += time.monotonic() - begun
