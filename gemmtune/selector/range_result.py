"""The result of tuning a range of M, as a value that prints and converts to JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..problem.rows import RowClass
from ..timing.rounds import BUSY_MARK
from .result import AGAIN, ProblemResult, busy
from .segments import Segment, Table

BAR_WIDTH = 64
MARKS = "█▓▒░"


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeResult:
    """The table of one class of problems, with its measurements.

    ``tuned_results`` are the results at the tuned Ms. ``times`` are microseconds by M and name of a choice. ``wrong`` are the
    excluded choices with the M at which they failed. All three are empty for a table from the store.
    """

    rows_class: RowClass
    table: Table
    tuned_results: tuple[ProblemResult, ...] = ()
    times: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    wrong: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    source: Literal["measured", "store"] = "store"

    def __str__(self) -> str:
        how = "from the store" if self.source == "store" else f"{len(self.tuned_results)} tuned values of M in {self.seconds:.1f} s"
        return "\n".join([f"{self.rows_class}: {how}", *table_lines(self.table)])

    def to_json(self) -> dict[str, Any]:
        """Return plain values: the problem that represents the class, the table, the results at the tuned Ms."""
        return {
            "problem": {"text": str(self.rows_class)} | self.rows_class.problem.to_json(),
            "table": self.table.to_json(),
            "tuned": [result.to_json() for result in self.tuned_results],
            "wrong": dict(self.wrong),
            "seconds": self.seconds,
            "source": self.source,
        }


class RangesResult(tuple[RangeResult, ...]):
    """The results of tuning ranges, one for each class of problems. Prints as bars of segments."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n\n".join(map(str, self))

    def to_json(self) -> list[dict[str, Any]]:
        return [result.to_json() for result in self]


def table_lines(table: Table) -> list[str]:
    """Return a bar of the segments on a logarithmic scale of M, and a line for each segment."""
    lines = [f"  {table.lo} {bar(table)} {table.hi}"]
    for i, x in enumerate(table.segments):
        lines.append(f"  {mark(i)} {_rows(x):>13}  {x.name:44} {_time(x)}{busy(table.disturbed) if x.time_us else ''}".rstrip())
    if table.reduction:
        lines.append(f"  batch-invariant: {table.reduction}")
    if table.disturbed:
        lines.append(f"  measured {BUSY_MARK} ({table.disturbed}): {AGAIN}")
    return lines


def bar(table: Table, width: int = BAR_WIDTH) -> str:
    """Draw the segments as blocks of one line. Neighbours differ, and each has at least one character if there is room."""
    span = math.log(table.hi + 1) - math.log(table.lo)
    text = ""
    for i, x in enumerate(table.segments):
        end = round(width * (math.log(x.hi + 1) - math.log(table.lo)) / span) if span else width
        text += mark(i) * max(end - len(text), 1)
    return text


def mark(index: int) -> str:
    """Return the character for the segment at that index."""
    return MARKS[index % len(MARKS)]


def _rows(x: Segment) -> str:
    return str(x.lo) if x.lo == x.hi else f"{x.lo}..{x.hi}"


def _time(x: Segment) -> str:
    return "" if x.time_us is None else f"{x.time_us:10.2f} µs"
