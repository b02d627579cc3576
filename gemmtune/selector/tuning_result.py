"""The results of one tuning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from .result import ProblemResult
from .table import render

__all__ = ["TuningResult"]


@dataclass(frozen=True, slots=True)
class TuningResult(Sequence[ProblemResult]):
    """The results of one tuning, a problem each, in the order asked. Prints as a table."""

    problems: tuple[ProblemResult, ...]

    @overload
    def __getitem__(self, index: int) -> ProblemResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ProblemResult]: ...
    def __getitem__(self, index: int | slice) -> ProblemResult | Sequence[ProblemResult]:
        return self.problems[index]

    def __len__(self) -> int:
        return len(self.problems)

    def __iter__(self) -> Iterator[ProblemResult]:
        return iter(self.problems)

    def __str__(self) -> str:
        return render(self)

    def to_json(self) -> list[dict[str, Any]]:
        """A list with ``ProblemResult.to_json`` of each problem."""
        return [p.to_json() for p in self.problems]
