"""Signals that end a process: within a block they end the work as Ctrl-C does, so that its results are kept."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals of schedulers (SLURM, Kubernetes, ``timeout``) and of a closed terminal."""


class Terminated(KeyboardInterrupt):
    """End by a signal of ENDING. ``status`` is the exit status as shells report it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.status = 128 + number
        super().__init__(f"got {signal.Signals(number).name}")


@contextlib.contextmanager
def raising(error: Callable[[int], BaseException] = Terminated) -> Iterator[None]:
    """Raise ``error(number)`` in the main thread at the first signal of ENDING, unless handled. Later ones are ignored."""
    process, taken, fired = os.getpid(), list[int](), list[int]()

    def end(number: int, _: object) -> None:
        if os.getpid() != process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        fired.append(number)
        for one in taken:
            if signal.getsignal(one) is end:
                signal.signal(one, signal.SIG_IGN)
        raise error(number)

    if threading.current_thread() is threading.main_thread():
        taken += [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) in (end, *([signal.SIG_IGN] if fired else ())):  # the program may have its own by now
                signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def not_lost() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of a block in which Ctrl-C was pressed, whatever became of that within it.

    C code that imports modules, as that of torch does numpy, clears an interruption or turns it into another error.
    """
    before, noted = signal.getsignal(signal.SIGINT), list[int]()
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _: object) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if noted:
            raise KeyboardInterrupt


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Let the cleaning up within the block run before a signal of ENDING ends this process as it would have without the block."""
    try:
        with raising():
            yield
    except Terminated as end:
        if signal.getsignal(end.number) is signal.SIG_DFL:
            os.kill(os.getpid(), end.number)
        raise
