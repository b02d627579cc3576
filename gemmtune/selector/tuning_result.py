"""The results of one tuning run."""

from __future__ import annotations

from typing import Any

from .result import ProblemResult
from .table import render


class TuningResult(tuple[ProblemResult, ...]):
    """The results of one tuning run, one for each problem in the order of the request. Prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        return render(self)

    def to_json(self) -> list[dict[str, Any]]:
        return [p.to_json() for p in self]
