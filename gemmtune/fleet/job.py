"""Job of a fleet: one problem, or every number of rows of one class of problems."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from ..problem import Problem
from ..problem.rows import RowClass, classes_over
from ..selector.range_result import RangeResult
from ..selector.result import ProblemResult

JobResult = ProblemResult | RangeResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work that one device does without a pause: ``problem`` alone or, with ``rows``, a table of its class over those M."""

    problem: Problem
    rows: range | None = None

    @classmethod
    def alone(cls, problems: Iterable[Problem]) -> list[Self]:
        """Return a job for each distinct problem."""
        return [cls(problem=problem) for problem in dict.fromkeys(problems)]

    @classmethod
    def tables(cls, problems: Iterable[Problem], rows: range) -> list[Self]:
        """Return a job for each distinct class that has some of ``rows``. Raises InvalidProblemError as ``classes_over`` does."""
        classes = dict.fromkeys(x for problem in problems for x in classes_over(problem, rows))
        return [cls(problem=x.problem, rows=rows) for x in classes if x.within(rows)]

    @property
    def rows_class(self) -> RowClass:
        """Class whose table the job makes."""
        return RowClass(problem=self.problem)

    @property
    def largest(self) -> Problem:
        """Problem with the largest M of the job."""
        return self.problem if self.rows is None else self.rows_class.at(self.rows_class.within(self.rows)[-1])

    def __str__(self) -> str:
        return str(self.problem) if self.rows is None else f"{self.rows_class} for M = {self.rows[0]}..{self.rows[-1]}"
