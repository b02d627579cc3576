"""What became of one case: values that travel between processes and into reports."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from ..cases.case import Case

MOST_LINES, MOST_WIDE = 20, 400
"""Of the words of an error that a GEMM raised: some have the whole of a compiler's output."""


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


def told(error: Exception) -> str:
    """The type and the words of an error, in MOST_LINES lines at most."""
    lines = f"{type(error).__name__}: {error}".rstrip().splitlines()
    more = [f"… ({len(lines) - MOST_LINES} more lines)"] if len(lines) > MOST_LINES else []
    return "\n".join([*(line.rstrip()[:MOST_WIDE] for line in lines[:MOST_LINES]), *more])


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
    """The reason of a refusal, an error, a crash or a time-out."""
    choice: str = ""
    """What ran, where the GEMM says so."""
    error_over_bound: float | None = None
    grade: float | None = None
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values; the case as its id."""
        return dataclasses.asdict(self) | {"case": self.case.id, "property": self.case.property_name}


MOST_CELLS = 64
"""Along each dimension."""


def heat_map(got: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor, batch: int) -> HeatMap:
    """The largest |got − expected| / tolerance in each cell of matrix ``batch``, all three float64 [B, M, N].

    An exact expectation (tolerance 0) is measured in units of float32 roundoff of the value, so that any difference shows.
    """
    x, y, t = got[batch], expected[batch], tolerance[batch]
    unit = torch.where(t > 0, t, 2.0**-24 * y.abs().clamp_min(2.0**-100))
    ratio = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs() / unit).nan_to_num(nan=math.inf)
    rows, cols = ratio.shape
    steps = (max(1, math.ceil(rows / MOST_CELLS)), max(1, math.ceil(cols / MOST_CELLS)))
    cells = torch.nn.functional.max_pool2d(ratio[None, None], steps, steps, ceil_mode=True)[0, 0]
    return HeatMap(batch=batch, rows=rows, cols=cols, cells=tuple(tuple(row) for row in cells.tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A case with its outcome; None where it was not run, and ``reason`` says why.

    ``known`` is the reason with which the case is listed as known to fail, None if it is not.
    """

    case: Case
    outcome: Outcome | None
    reason: str = ""
    known: str | None = None
    drawn: bool = False
    sanitized: bool = False
    """Found by compute-sanitizer, which has to be there again to see it. It is none of the cases that are judged one by one."""

    @property
    def executed(self) -> bool:
        """The GEMM was called, and gave an answer or failed to."""
        return self.outcome is not None and self.outcome.verdict is not Verdict.REFUSED and not self.sanitized

    @property
    def refused(self) -> bool:
        """The GEMM said that it does not do this."""
        return self.outcome is not None and self.outcome.verdict is Verdict.REFUSED

    @property
    def bad(self) -> bool:
        """It failed, known or not."""
        return self.outcome is not None and self.outcome.verdict.bad

    @property
    def failed(self) -> bool:
        """It failed, and is not known to."""
        return self.bad and self.known is None

    @property
    def known_failure(self) -> bool:
        """It failed as it is known to."""
        return self.bad and self.known is not None

    @property
    def surprise(self) -> bool:
        """It is listed as known to fail, and passed."""
        return self.known is not None and self.outcome is not None and self.outcome.verdict is Verdict.PASSED
