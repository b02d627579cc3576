"""The results of one tuning."""

from __future__ import annotations

from typing import Any

from .result import ProblemResult
from .table import render


class TuningResult(tuple[ProblemResult, ...]):
    """The results of one tuning, a problem each, in the order asked. Prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        return render(self)

    def to_json(self) -> list[dict[str, Any]]:
        """A list with ``ProblemResult.to_json`` of each problem."""
        return [p.to_json() for p in self]
