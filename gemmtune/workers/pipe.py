"""Parent's end of the pipe to a worker process: each message takes a limited time and a limited size."""

import functools
import socket
import struct
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

READY = b"ready"
"""First message of a child, once it has imported its modules."""
MOST_BYTES = 2**28
"""Largest message. A longer one can only be announced by bytes that are no header."""
PIECE_BYTES = 2**20
DEATH_CHECK_S = 0.25
"""Interval at which a waiting parent checks that the child lives: another process may keep the child's end of the pipe open."""


class GarbledError(ValueError):
    """Error of bytes that are no message."""


class Pipe:
    """One end of a socket pair. The other end is a ``multiprocessing.connection.Connection``, which sets the form of messages.

    Args:
        end: this end.
        ended: returns True once the process at the other end has exited.
    """

    def __init__(self, end: socket.socket, ended: Callable[[], bool]) -> None:
        self._end = end
        self._ended = ended

    def send(self, message: bytes, timeout_s: float) -> None:
        """Send a message. Raises TimeoutError if it is not taken in time, and OSError or EOFError if nobody can take it."""
        deadline, rest = time.monotonic() + timeout_s, memoryview(struct.pack("!i", len(message)) + message)
        while rest:
            rest = rest[self._within(deadline, functools.partial(self._end.send, rest)) :]

    def receive(self, timeout_s: float) -> bytes:
        """Return the next message. Raises TimeoutError, EOFError if the process ended, GarbledError for no message."""
        deadline = time.monotonic() + timeout_s
        (size,) = struct.unpack("!i", self._read(4, deadline))
        if not 0 <= size <= MOST_BYTES:
            raise GarbledError(f"got a message of {size} bytes, expected at most {MOST_BYTES}")
        return self._read(size, deadline)

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._within(deadline, functools.partial(self._end.recv, min(size - len(data), PIECE_BYTES)))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def _within(self, deadline: float, transfer: Callable[[], T]) -> T:
        """Return the result of ``transfer`` once the other end is ready for it."""
        while True:
            ended, remaining_s = self._ended(), deadline - time.monotonic()
            self._end.settimeout(max(0.001, min(DEATH_CHECK_S, remaining_s)))
            try:
                return transfer()
            except TimeoutError:
                if ended:
                    raise EOFError from None
                if remaining_s <= 0:
                    raise
