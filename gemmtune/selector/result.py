"""The results of tuning one problem, as values that convert to JSON."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..choice import Refusal, Status
from ..errors import ELSE_TORCH, MORE_BACKENDS, NoValidChoicesError
from ..filters import REGEXES
from ..problem import Problem
from ..settings import Settings
from ..timing.neighbours import credible_ratio
from ..timing.rounds import BUSY_MARK

DISTURBED = "disturbed"
"""Key of an outcome's ``info`` for the disturbance of its measurement. ``tune(again=True)`` measures such an outcome again."""
AGAIN = "measure it again on a quiet machine, by tune(…, again=True) or gemmtune tune --again"
"""Remedy for results of a busy machine."""
HOST_US = "host_us"
"""Key for gemmtune's own host time in ``time_us``, if that is the time of a whole call."""
LIMIT_S = "limit_s"
"""Key for the time limit in seconds that a choice exceeded. A larger limit tries the choice again."""
LIMITS = {Status.COMPILE_TIMEOUT: "compile_timeout_s", Status.TIMED_OUT: "choice_timeout_s"}
"""The setting of the limit that a choice with this status exceeded."""
MARGIN_US = "margin_us"
"""Key for half the 95% interval of ``time_us`` in the final rounds."""
PLACE = "place"
"""Key for a choice's position among the offers, which breaks ties."""
SETTLED = "settled"
"""Key that marks a completed comparison in the store. An interrupted tuning leaves outcomes without it."""
ALONE = "alone"
"""Value of ``SETTLED`` for the only correct choice. It must be compared as soon as there are others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one choice for one problem.

    ``time_us`` is the median time of a call in microseconds, None unless ``status`` is ok. ``error_over_bound`` is the largest
    verified error divided by the error bound, at most 1 for a correct choice. ``finalist`` is True if the time comes from the
    interleaved final rounds, and False if it comes from the cheaper rounds that drop losers.
    """

    name: str
    backend: str
    content_hash: str
    status: Status
    time_us: float | None = None
    error_over_bound: float | None = None
    reason: str = ""
    finalist: bool = False
    baseline: bool = False
    from_store: bool = False
    info: dict[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of_refusal(cls, refusal: Refusal) -> "Outcome":
        """Return an untried choice as an outcome, for complete listings."""
        backend = refusal.name.split(":")[0]
        return cls(name=refusal.name, backend=backend, content_hash="", status=Status.REFUSED, reason=refusal.reason)

    @property
    def host_us(self) -> float:
        """gemmtune's own host time in ``time_us``; 0 if that is the time of the kernel alone."""
        return _figure(self.info.get(HOST_US), 0.0)

    @property
    def direct_us(self) -> float | None:
        """The time without gemmtune's own work, comparable with a direct call of torch. Own work that seems longer leaves 0."""
        return None if self.time_us is None else max(self.time_us - self.host_us, 0.0)

    @property
    def place(self) -> float:
        """The choice's position among the offers. Variants come after them."""
        return _figure(self.info.get(PLACE), math.inf)

    @property
    def disturbed(self) -> str:
        """The disturbance of this measurement by other work on the machine; empty if none was seen."""
        return str(self.info.get(DISTURBED, ""))

    @property
    def settled(self) -> bool:
        """True if nothing remains to measure: the choice failed, or was ranked in the final rounds or dropped before them."""
        return self.status is not Status.OK or bool(self.info.get(SETTLED))


def _figure(value: object, otherwise: float) -> float:
    """Return a number of ``info`` that is 0 or more, and ``otherwise`` for anything else that a store may hold."""
    return float(value) if isinstance(value, (int, float)) and 0 <= value < math.inf else otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemResult:
    """All findings for one problem. ``pick`` is the name of the chosen outcome, None if no choice is valid.

    ``limit_us`` is the shortest time that the measured memory bandwidth and arithmetic rate allow, None if they were not measured.
    ``limit_disturbed`` is True if one of them was measured on a busy machine. ``source`` is ``store`` if nothing was measured.
    ``partial`` says what was not measured for want of time.
    """

    problem: Problem
    outcomes: tuple[Outcome, ...]
    refusals: tuple[Refusal, ...]
    pick: str | None
    limit_us: float | None
    limit_disturbed: bool = False
    seconds: float
    source: Literal["measured", "store"]
    partial: str = ""

    def __str__(self) -> str:
        time = f", {self.picked.time_us:.1f} µs{busy(self.disturbed)}" if self.picked and self.picked.time_us else ""
        return f"{self.problem}: {self.pick or 'no pick'}{time}, tried: {len(self.outcomes)}"

    @property
    def picked(self) -> Outcome | None:
        """The outcome of the pick."""
        return next((o for o in self.outcomes if o.name == self.pick), None)

    @property
    def baseline(self) -> Outcome | None:
        """The outcome of torch's own operation; None if it was not among the choices or failed."""
        return next((o for o in self.outcomes if o.baseline and o.time_us), None)

    @property
    def speedup_over_torch(self) -> float | None:
        """Time of torch's own operation, called directly, divided by the time of the pick. None unless both were measured.

        It is None too if a busy machine explains it.
        """
        if self.picked is None or self.baseline is None:
            return None
        return credible_ratio(self.baseline.direct_us, self.picked.time_us, self.disturbed)

    @property
    def disturbed(self) -> str:
        """The disturbance of the pick's measurement, or of torch's, by other work on the machine; empty if none was seen."""
        return next((o.disturbed for o in (self.picked, self.baseline) if o and o.disturbed), "")

    @property
    def disturbed_now(self) -> str:
        """The disturbance of what this tuning measured; empty if none was seen."""
        now = (o for o in self.outcomes if o.status is Status.OK and not o.from_store)
        return next((o.disturbed for o in now if o.disturbed), "")

    def to_json(self) -> dict[str, Any]:
        """Return plain values: problem, pick, speedup_over_torch, and all choices, the refused ones included."""
        return {
            "problem": {"text": str(self.problem)} | self.problem.to_json(),
            "pick": self.pick,
            "speedup_over_torch": self.speedup_over_torch,
            "limit_us": self.limit_us,
            "limit_disturbed": self.limit_disturbed,
            "disturbed": self.disturbed,
            "seconds": self.seconds,
            "source": self.source,
            "partial": self.partial,
            "choices": [dataclasses.asdict(o) for o in self.outcomes]
            + [dataclasses.asdict(Outcome.of_refusal(r)) | {"count": r.count} for r in self.refusals],
        }


def busy(disturbed: str) -> str:
    """Return the mark that stands behind a time or a ratio of a busy machine, and "" for a quiet one."""
    return f" ({BUSY_MARK})" if disturbed else ""


def without_pick(result: ProblemResult, settings: Settings) -> NoValidChoicesError:
    """Return the error for a problem without a pick: every choice that was left out, and what helps."""
    left_out = [(o.name, str(o.status), o.reason) for o in (*result.outcomes, *map(Outcome.of_refusal, result.refusals))]
    return NoValidChoicesError(str(result.problem), left_out, remedy_for(result.outcomes, settings, result.refusals))


def remedy_for(outcomes: Iterable[Outcome], settings: Settings, refusals: Iterable[Refusal] = ()) -> str:
    """Return the sentence that says what helps a problem without a pick."""
    outcomes, reasons = list(outcomes), [refusal.reason for refusal in refusals]
    regexes = [name for row in REGEXES for name in (row.allow, row.deny) if any(x.startswith(name) for x in reasons)]
    failed = [o for o in outcomes if o.disturbed]
    slow = " or ".join(name for status, name in LIMITS.items() if any(o.status is status for o in outcomes))
    if failed:
        raised = f", or raise {slow}" if slow else ""
        return f"Tune it again on an idle machine{raised}: {', '.join(sorted({o.disturbed for o in failed}))}."
    if slow:
        return f"Raise {slow}, and tune it again."
    if regexes:
        return f"Change or unset {' or '.join(regexes)}."
    return f"{MORE_BACKENDS}." if settings.fallback_to_aten else ELSE_TORCH
