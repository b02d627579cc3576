"""The C functions of a kernel's shared object, and their statuses."""

from __future__ import annotations

import ctypes
from pathlib import Path

from ...errors import ErrorFromChoice
from ...problem import Problem
from ...toolchain import shared_object

__all__ = ["Library", "refusal"]

STATUSES = {-1: "the driver has no cuTensorMapEncodeTiled", -2: "an operand cannot be described to TMA"}
"""Of calls.h.jinja; others are those of the CUDA runtime, and of the driver, which are the same."""


class Library(shared_object.Library):
    """``prepare`` makes the kernel ready on the device with a number."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.prepare = self._functions.gemmtune_prepare
        self.prepare.argtypes = [ctypes.c_int]


def refusal(status: int, name: str, problem: Problem) -> ErrorFromChoice:
    """The error that a status other than that of success means."""
    return ErrorFromChoice(name, str(problem), STATUSES.get(status, f"CUDA error {status}"))
