"""Failures that the machine or the moment caused. They say nothing about the choice that was tried, which is tried again."""

import errno
import os

from ..choice import Status
from ..timing.rounds import BUSY_MARK
from ..workers.worker import DIED, GARBLED, NO_ANSWER
from .samples import NO_MEMORY, Sample

KILLED = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
"""Signals that other processes send, such as an OOM killer. A choice that crashes dies by another one."""
WHILE_BUSY = "(compile_timeout_s) while "
"""Part of the message of a compilation that other work on the machine delayed beyond its limit."""


def _errors(*numbers: int) -> tuple[str, ...]:
    return tuple(map(os.strerror, numbers))


CAUSES: dict[str, tuple[str, ...]] = {
    "the disk was full": _errors(errno.ENOSPC, errno.EDQUOT),
    "too many files were open": _errors(errno.EMFILE, errno.ENFILE),
    "the file system failed": _errors(errno.EIO, errno.ESTALE, errno.EROFS),
    "no process or thread could start": (*_errors(errno.EAGAIN), "can't start new thread"),
    "memory was short": (
        *NO_MEMORY, *_errors(errno.ENOMEM),
        "out of memory", "out_of_memory", "bad_alloc", "memory exhausted", "STATUS_ALLOC_FAILED",
    ),
    "the stack was too deep": ("RecursionError: ",),
    "it was interrupted": (*_errors(errno.EINTR), "KeyboardInterrupt"),
    "the process was killed": (
        *(f"{DIED}{name}" for name in KILLED),
        "Killed signal terminated", "died due to signal 9", "unable to execute command: Killed",
        "ended with -9", "ended with -15", "died with <Signals.SIGKILL",
    ),
    "its answer was garbled": (GARBLED,),
    "it ran out of time": (NO_ANSWER, WHILE_BUSY),
    "the GPU was lost": (
        "GPU is lost", "busy or unavailable", "no CUDA-capable device", "uncorrectable ECC error", "uncorrectable NVLink error",
        "driver shutting down", "system not yet initialized",
    ),
    f"the limits were measured {BUSY_MARK}": (f"({BUSY_MARK})",),
}  # fmt: skip
"""Phrases of messages by cause: those of the operating system, of Python, torch, CUDA and compilers."""
_PHRASES = {cause: tuple(phrase.casefold() for phrase in phrases) for cause, phrases in CAUSES.items()}


def accident(reason: str) -> str:
    """Return what the machine did, by the message of a failure; empty for a fault of the choice."""
    text = reason.casefold()
    return next((cause for cause, phrases in _PHRASES.items() if any(phrase in text for phrase in phrases)), "")


def done_by_machine(sample: Sample) -> str:
    """Return what the machine, and no property of the choice, did to keep a choice from running; empty otherwise."""
    return "" if sample.status in (Status.OK, Status.WRONG_RESULT, Status.DISHONEST) else accident(sample.reason)
