"""What became of one case: values that travel between processes and into reports."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..cases.case import Case

__all__ = ["Failure", "HeatMap", "Outcome", "Verdict"]


class Verdict(StrEnum):
    """PASSED and FAILED are answers. The next four say why there is none; all but REFUSED count against the GEMM."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    """The GEMM raised an error for something that it does not declare: not tested, and listed with the error."""
    RAISED = "raised"
    """The GEMM raised an error for something that it declares."""
    CRASHED = "crashed"
    """The process died, or its device became unusable."""
    TIMED_OUT = "timed_out"

    @property
    def bad(self) -> bool:
        """Counts against the GEMM."""
        return self not in (Verdict.PASSED, Verdict.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """|got − expected| over the tolerance, the largest in each cell of a grid over one matrix of the result.

    ``rows`` and ``cols`` are the matrix's size. Above 1 is wrong; infinity stands for NaN and elements that were not written.
    """

    batch: int
    rows: int
    cols: int
    cells: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One thing that is wrong. ``property_name`` is what is violated, which may be another one than the case was made for."""

    property_name: str
    message: str
    """What was got and expected, and where, in one line."""
    diagnosis: str = ""
    """What a bug of this kind looks like, such as ``last K block dropped``; empty where nothing known fits."""
    also: tuple[str, ...] = ()
    """Other bugs that would give this result too, as far as this case can tell."""
    examined: bool = True
    """Whether a diagnosis was looked for; enough cases like this one were examined before if not."""
    index: tuple[int, ...] | None = None
    got: float | None = None
    expected: float | None = None
    tolerance: float | None = None
    bad_elements: int | None = None
    elements: int | None = None
    heat: HeatMap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A case with its verdict. ``error_over_bound`` is the largest error as a fraction of the bound, where there was one."""

    case: Case
    verdict: Verdict
    failures: tuple[Failure, ...] = ()
    reason: str = ""
    """Of a refusal, an error, a crash or a time-out."""
    choice: str = ""
    """What ran, where the GEMM says so."""
    error_over_bound: float | None = None
    grade: float | None = None
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values; the case as its id."""
        return dataclasses.asdict(self) | {"case": self.case.id, "property": self.case.property_name}
