"""Warnings about the user's line, however many of our functions lie between."""

import sys
import warnings
from types import FrameType

BETWEEN = frozenset({"gemmtune", "torch", "contextlib", "functools", "importlib", "threading", "concurrent"})
"""Packages whose frames lie between a user's line and a warning: ours, torch's operators, decorators, imports and threads."""

_said: set[str] = set()


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the innermost line of the stack that is the user's, or at the outermost one if none is."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _module(frame).partition(".")[0] in BETWEEN:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})  # Python shows a text once for each line
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, _module(frame), registry)


def warn_once(message: str) -> None:
    """Warn at the first time of a text in this process. One call may have the same reason for each of its problems."""
    if message not in _said:
        warn(message)
        _said.add(message)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "<unknown>"))
