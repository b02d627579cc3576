"""What tuning found for one problem, as values that convert to JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from ..choice import Refusal, Status
from ..problem import Problem

DISTURBED = "disturbed"
"""The key of an outcome's ``info`` that tells what disturbed its measurement, so that a later tuning measures it again."""
HOST_US = "host_us"
"""The key for what ``time_us`` has in it of gemmtune's own work, where it is the time of a whole call."""
MOVED = "moved"
"""The key for how a choice was come to that no backend offers: ``from`` the content hash of one that is, and the parameters that it
was given instead."""
PLACE = "place"
"""The key for a choice's place among the offers, which decides between those that are tied."""
SETTLED = "settled"
"""The key of an outcome's ``info`` that survives in the store: an interrupted tuning leaves outcomes without it."""
ALONE = "alone"
"""What ``SETTLED`` is of the only right one: with others beside it, it has still to be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one choice fared on one problem.

    ``time_us`` is the median time of a call in microseconds, None unless ``status`` is ok. ``error_over_bound`` is the largest
    error that verification saw, as a fraction of the error bound (at most 1 for a right choice). ``finalist`` tells whether the
    time comes from the interleaved final rounds or from the cheaper ones that drop losers.
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
    def of_refusal(cls, refusal: Refusal) -> Outcome:
        """What was not tried as an outcome, for those who list everything."""
        backend = refusal.name.split(":")[0]
        return cls(name=refusal.name, backend=backend, content_hash="", status=Status.REFUSED, reason=refusal.reason)

    @property
    def host_us(self) -> float:
        """The part of ``time_us`` that is gemmtune's own work on the host; 0 where the time is that of the kernel alone."""
        return float(self.info.get(HOST_US, 0.0))

    @property
    def direct_us(self) -> float | None:
        """The time without gemmtune's own work: what a caller of torch has."""
        return None if self.time_us is None else self.time_us - self.host_us

    @property
    def place(self) -> float:
        """The choice's place among the offers; variants come after them."""
        return float(self.info.get(PLACE, math.inf))

    @property
    def disturbed(self) -> str:
        """What else the machine did while this was measured; empty if nothing that could be seen."""
        return str(self.info.get(DISTURBED, ""))

    @property
    def settled(self) -> bool:
        """Failed, or compared with the others: ranked in the final rounds or dropped before them. Nothing is left to measure."""
        return self.status is not Status.OK or bool(self.info.get(SETTLED))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemResult:
    """Everything found for one problem. ``pick`` is the name of the chosen outcome, None when nothing valid was left.

    ``limit_us`` is the time that this machine's measured memory bandwidth and arithmetic rate allow at best, None if not measured.
    ``source`` tells whether anything had to be measured.
    """

    problem: Problem
    outcomes: tuple[Outcome, ...]
    refusals: tuple[Refusal, ...]
    pick: str | None
    limit_us: float | None
    seconds: float
    source: Literal["measured", "store"]

    def __str__(self) -> str:
        time = f", {self.picked.time_us:.1f} µs" if self.picked and self.picked.time_us else ""
        return f"{self.problem}: {self.pick or 'no pick'}{time}, tried: {len(self.outcomes)}"

    @property
    def picked(self) -> Outcome | None:
        """The outcome of the pick."""
        return next((o for o in self.outcomes if o.name == self.pick), None)

    @property
    def baseline(self) -> Outcome | None:
        """The outcome of torch's own operation, None if it was not among the choices or failed."""
        return next((o for o in self.outcomes if o.baseline and o.time_us), None)

    @property
    def speedup_over_torch(self) -> float | None:
        """Time of torch's own operation, called directly, over that of the pick; None unless both were measured."""
        if not (self.picked and self.picked.time_us and self.baseline and self.baseline.direct_us):
            return None
        return self.baseline.direct_us / self.picked.time_us

    @property
    def disturbed(self) -> str:
        """What else the machine did while the pick was measured; empty if nothing that could be seen."""
        return self.picked.disturbed if self.picked else ""

    def to_json(self) -> dict[str, Any]:
        """Plain values: problem, pick, speedup_over_torch, choices (the refused ones too)."""
        return {
            "problem": {"text": str(self.problem)} | self.problem.to_json(),
            "pick": self.pick,
            "speedup_over_torch": self.speedup_over_torch,
            "limit_us": self.limit_us,
            "seconds": self.seconds,
            "source": self.source,
            "choices": [dataclasses.asdict(o) for o in self.outcomes]
            + [dataclasses.asdict(Outcome.of_refusal(r)) | {"count": r.count} for r in self.refusals],
        }
