"""The C functions of a kernel's shared object."""

from __future__ import annotations

import ctypes
from pathlib import Path

from ...errors import ErrorFromChoice
from ...problem import Problem
from .. import shared_object

__all__ = ["Library", "require"]

STATUSES = {-1: "the driver has no cuTensorMapEncodeTiled", -2: "an operand cannot be described to TMA"}
"""Of maps.h.jinja; others are those of the CUDA runtime, and of the driver, which are the same."""


class Library(shared_object.Library):
    """``prepare`` makes the kernel ready on the device with a number; ``call`` launches it, see ``arguments.h.jinja``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.prepare, self.call = self._functions.gemmtune_prepare, self._functions.gemmtune_call
        self.prepare.argtypes = [ctypes.c_int]
        self.call.argtypes = [ctypes.c_void_p, ctypes.c_char_p]


def require(status: int, name: str, problem: Problem) -> None:
    """Raises ErrorFromChoice unless ``status`` is that of success."""
    if status:
        raise ErrorFromChoice(name, str(problem), STATUSES.get(status, f"CUDA error {status}"))
