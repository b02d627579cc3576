"""Calls of one problem: times, errors, and the conduct that they show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..problem import Problem
from ..timing.timer import median_margin
from .candidate import Candidate
from .conduct import Conduct
from .mean_errors import Trouble
from .repeats import LEAST_REPEATS, is_from_memory, of_least

SELDOM = 0.02
"""Share of wrong results below which a GEMM is right sometimes."""
LEAST_BITS, MOST_BITS = 5, 0.9
"""Number of timed results, and share of them, with the bits of torch's, that tell whose work they are."""
SURE = 2
"""Calls with torch's bits in two processes where these differ. An honest call cannot have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Calls of one problem: times in pairs of the GEMM and torch, and what was wrong."""

    problem: Problem
    calls: int = 0
    pairs: tuple[tuple[float, float], ...] = ()
    """Seconds of the GEMM and of torch for the same operands."""
    first_s: float = 0.0
    """Seconds of the first call, in which a GEMM may compile or tune."""
    repeats: tuple[tuple[float, float], ...] = ()
    """Work for new operands and for the same ones again. They are those of a second look if the first ones are suspicious."""
    equal: tuple[bool, ...] = ()
    """True for each repetition that gave the same bits."""
    hidden: tuple[bool, ...] = ()
    """True for each call that took far longer by the clock outside of its process than by events of a GPU inside of it."""
    wrong: tuple[tuple[int, Trouble, bool], ...] = ()
    """Number of each wrong call, its error, and True if it gave the result that was right for earlier operands."""
    refused: str = ""
    ran: tuple[frozenset[str], ...] = ()
    """Names of torch's operations and of a GPU's kernels in each profiled call."""
    added_s: tuple[float, float] = (0.0, 0.0)
    """Seconds that the judge adds to a call on a GPU, which are taken off each time, with half their 95% interval."""
    bits: tuple[bool, ...] = ()
    """True for each timed result that has the bits of torch's."""
    bits_profiled: tuple[bool, ...] = ()
    """The same of profiled calls, without the first."""
    follows: tuple[bool, ...] = ()
    """True for each call that had torch's bits in two processes, or differed as torch's did, where these are two results."""
    departs: bool = False
    """True if results have other bits in every process in which torch's products have others."""

    @property
    def ratio(self) -> tuple[float, float] | None:
        """Median of the logarithm of torch's time over the GEMM's, with half its 95% interval."""
        logs = [math.log(torch_s / own_s) for own_s, torch_s in self.pairs if own_s > 0 and torch_s > 0]
        if len(logs) < 3:
            return None
        middle, half = median_margin(logs)
        of_added = self.added_s[1] * abs(1 - math.exp(-middle)) / (self.time_s or math.inf)
        return middle, math.hypot(half, of_added)

    @property
    def hides_torch(self) -> bool:
        """True if timed results have the bits of torch's, and those of profiled calls have not."""
        often = len(self.bits) >= LEAST_BITS and sum(self.bits) > MOST_BITS * len(self.bits)
        return often and bool(self.bits_profiled) and not any(self.bits_profiled)

    @property
    def time_s(self) -> float | None:
        """Median time of the GEMM."""
        return statistics.median(own_s for own_s, _ in self.pairs) if self.pairs else None


def note_calls(candidate: Candidate, shapes: Sequence[Shape]) -> None:
    """Note the conduct that the calls of all shapes show.

    Of a GEMM that is wrong more often than it is rough, such as one that drops the last term, mean errors show no type.
    """
    calls, wrong = sum(shape.calls for shape in shapes), [(shape, *found) for shape in shapes for found in shape.wrong]
    stale, rough = ([x for x in wrong if x[3]], [x for x in wrong if x[2].rough and not x[3]])
    exact = [x for x in wrong if not x[2].rough]
    for kind, found in ((Conduct.STALE, stale), (Conduct.ROUGH, rough if len(rough) >= len(exact) else [])):
        if found:
            shape, number, trouble, _ = found[0]
            candidate.note(kind, f"call {number} of {shape.problem}: {trouble.text}")
    if exact:
        shape, number, trouble, _ = exact[0]
        seldom = len(exact) < SELDOM * calls or all(shape.refused for shape, *_ in exact)
        kind = Conduct.SOMETIMES if seldom else Conduct.WRONG
        candidate.note(kind, f"{len(exact)} of {calls} calls, the first is call {number} of {shape.problem}: {trouble.text}")
    for shape in shapes:
        if len(shape.hidden) >= LEAST_REPEATS and sum(shape.hidden) > len(shape.hidden) / 2:
            candidate.note(Conduct.CLOCK, f"{shape.problem}: {sum(shape.hidden)} of {len(shape.hidden)} calls")
        if shape.hides_torch:
            detail = f"{sum(shape.bits)} of {len(shape.bits)} timed results have the bits of torch's"
            candidate.note(Conduct.TORCH, f"{shape.problem}: {detail}, and none of {len(shape.bits_profiled)} profiled ones")
        if sum(shape.follows) >= SURE:
            detail = f"{sum(shape.follows)} of {len(shape.follows)} results have the bits of torch's, or nearly"
            candidate.note(Conduct.TORCH, f"{shape.problem}: {detail}, also where these are others")
        if shape.departs:
            candidate.note(Conduct.TORCH, f"{shape.problem}: results have other bits wherever torch's products have others")
        if is_from_memory(shape.repeats):
            detail = (
                f"{shape.problem}: equal operands at other addresses take {of_least(shape.repeats):.0%} of the work of new ones"
            )
            candidate.note(Conduct.REUSED, detail)
