"""The expected result of one call, and the outcome of one case: values that travel between processes and into reports."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from ...numerics.operands import Operands
from ...numerics.propagate import Approximate
from ...untrusted.candidate import RemoteError
from ..cases.case import Case

MOST_LINES, MOST_WIDE = 20, 400
"""Maximum lines and characters of an error message of a GEMM. Some contain the whole output of a compiler."""
IMPOSSIBLE = "not possible here: "
"""Beginning of the reason of a case that this machine cannot run. The GEMM did not refuse it."""


class CaseStatus(StrEnum):
    """Status of a case. PASSED and FAILED judge a result. The others mean that there is none, and all but REFUSED are failures."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    """The GEMM raised an error for something undeclared. The case is not tested, and is listed with the error."""
    RAISED = "raised"
    """The GEMM raised an error for something that it declares."""
    CRASHED = "crashed"
    """The process died, or its device became unusable."""
    TIMED_OUT = "timed_out"

    @property
    def bad(self) -> bool:
        """True if the status counts against the GEMM."""
        return self not in (CaseStatus.PASSED, CaseStatus.REFUSED)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """All elements of the right result, float64 (B, M, N), and the operands that they came from."""

    name: str
    operands: Operands
    right: Approximate
    known: bool = True
    """False if ``right`` may itself be wrong. Then no bug is named as the explanation."""


class NoResult(Exception):
    """The check ends here, for instance because a call returned nothing that can be judged. The failure has been recorded."""


def error_text(error: Exception) -> str:
    """Return the type and message of an error, at most MOST_LINES lines. The message of a RemoteError begins with its type."""
    text = str(error) if isinstance(error, RemoteError) else f"{type(error).__name__}: {error}"
    lines = text.rstrip().splitlines()
    more = [f"… ({len(lines) - MOST_LINES} more lines)"] if len(lines) > MOST_LINES else []
    return "\n".join([*(line.rstrip()[:MOST_WIDE] for line in lines[:MOST_LINES]), *more])


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Largest |got − expected| ÷ tolerance per cell of a matrix of the result. Infinite: NaN and unwritten elements."""

    batch: int
    rows: int
    cols: int
    cells: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One fault. ``property_name`` is the violated property, which may differ from the property of the case."""

    property_name: str
    message: str
    """Got, expected and place, in one line."""
    diagnosis: str = ""
    """Likely bug, such as ``last K block dropped``. Empty if no known bug matches."""
    also: tuple[str, ...] = ()
    """Other bugs that would give the same result, as far as this case can tell."""
    examined: bool = True
    """False if no diagnosis was made, because enough similar cases were diagnosed before."""
    index: tuple[int, ...] | None = None
    got: float | None = None
    expected: float | None = None
    tolerance: float | None = None
    bad_elements: int | None = None
    elements: int | None = None
    heat: HeatMap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A case with its status. ``error_over_bound`` is the largest error as a fraction of the bound, if there was a bound."""

    case: Case
    status: CaseStatus
    failures: tuple[Failure, ...] = ()
    reason: str = ""
    """Reason of a refusal, an error, a crash or a time-out."""
    choice: str = ""
    """Name of what ran, if the GEMM reports it."""
    error_over_bound: float | None = None
    grade: float | None = None
    seconds: float = 0.0
    complete: bool = True
    """False if the check ended before it had compared everything: at a failure, or at a call that was refused."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values, with the id of the case."""
        values = dataclasses.asdict(self)
        return values | {"case": self.case.id, "verdict": values.pop("status"), "property": self.case.property_name}


MOST_CELLS = 64
"""Maximum cells along each dimension."""


def heat_map(got: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor, batch: int) -> HeatMap:
    """Return the map of matrix ``batch`` of tensors (B, M, N) in float64, which are not empty.

    For an exact expectation (tolerance 0) the unit is float32 roundoff of the value, so that any difference shows.
    """
    x, y, t = got[batch], expected[batch], tolerance[batch]
    unit = torch.where(t > 0, t, 2.0**-24 * y.abs().clamp_min(2.0**-100))
    ratio = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs() / unit).nan_to_num(nan=math.inf)
    rows, cols = ratio.shape
    steps = (math.ceil(rows / MOST_CELLS), math.ceil(cols / MOST_CELLS))
    cells = torch.nn.functional.max_pool2d(ratio[None, None], steps, steps, ceil_mode=True)[0, 0]
    return HeatMap(batch=batch, rows=rows, cols=cols, cells=tuple(tuple(row) for row in cells.tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A case with its outcome, or None and the ``reason``. ``known`` is the reason why the case is known to fail, or None."""

    case: Case
    outcome: Outcome | None
    reason: str = ""
    known: str | None = None
    drawn: bool = False
    sanitized: bool = False
    """Found by compute-sanitizer. Such a record is needed to repeat the finding, and counts as no executed case."""

    @property
    def executed(self) -> bool:
        """True if the GEMM was called and did not refuse."""
        return self.outcome is not None and self.outcome.status is not CaseStatus.REFUSED and not self.sanitized

    @property
    def refused(self) -> bool:
        """True if the GEMM refused the case."""
        return self.outcome is not None and self.outcome.status is CaseStatus.REFUSED

    @property
    def bad(self) -> bool:
        """True if the case failed, known or not."""
        return self.outcome is not None and self.outcome.status.bad

    @property
    def failed(self) -> bool:
        """True if the case failed and is not listed as a known failure."""
        return self.bad and self.known is None

    @property
    def known_failure(self) -> bool:
        """True if the case failed and is listed as a known failure."""
        return self.bad and self.known is not None

    @property
    def cut_short(self) -> bool:
        """True if a violation of other properties alone ended the case, which then shows nothing about its own property."""
        outcome = self.outcome
        if outcome is None or outcome.complete or not self.executed:
            return False
        return all(failure.property_name != self.case.property_name for failure in outcome.failures)

    @property
    def surprise(self) -> bool:
        """True if the case is listed as a known failure, but passed."""
        return self.known is not None and self.outcome is not None and self.outcome.status is CaseStatus.PASSED


def cut_short_by(records: Iterable[Record]) -> str:
    """Return what ended the first of the cases that were cut short, or "" if none was."""
    first = next((record.outcome.failures[0] for record in records if record.cut_short and record.outcome), None)
    return "" if first is None else f"every case that ran was cut short by a failure of {first.property_name}: {first.message}"
