"""What the C functions of a kernel return."""

from __future__ import annotations

from ...errors import ErrorFromChoice
from ...problem import Problem

__all__ = ["require"]

STATUSES = {-1: "the driver has no cuTensorMapEncodeTiled", -2: "an operand cannot be described to TMA"}
"""Of maps.h.jinja; others are those of the CUDA runtime, and of the driver, which are the same."""


def require(status: int, name: str, problem: Problem) -> None:
    """Raises ErrorFromChoice unless ``status`` is that of success."""
    if status:
        raise ErrorFromChoice(name, str(problem), STATUSES.get(status, f"CUDA error {status}"))
