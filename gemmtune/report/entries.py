"""One problem of a store or a result, as reports show it, and pairs of the same problem in two files."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import StoreError
from ..foreign import shown
from ..problem import Problem
from ..store.exchange import LEAST_TIME_US, MOST_TIME_US
from ..store.row import stored_problem
from ..timing.limits import least_work
from ..timing.neighbours import credible_ratio
from ..timing.rounds import tie


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below and above > 0 and below > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A problem with its pick. ``name`` is None if no choice is correct. Times are in µs."""

    text: str
    key: str = ""
    """The problem's key, "" in a file that has only its text."""
    place: str = ""
    """Device and timing of the measurement as canonical JSON, "" in results, which name no machine."""
    machine: str = ""
    """The machine's fingerprint, "" in results."""
    name: str | None = None
    time_us: float | None = None
    torch_us: float | None = None
    """Time of torch's own operation, called directly."""
    limit_us: float | None = None
    """Least time by the machine's bandwidth and rate."""
    limit_rough: bool = False
    """True if these were measured on a busy machine."""
    disturbed: str = ""
    measured_at: str = ""
    seconds: float | None = None
    """Time that the tuning of this problem took."""
    others: tuple[tuple[str, float], ...] = ()
    """The next best choices with their times."""
    failures: tuple[tuple[str, str, str], ...] = ()
    """Choices that failed or were refused, with status and reason."""
    verdict: str = ""
    """Decision of a performance gate, with its reason."""
    paired: float | None = None
    """Time of the pick divided by torch's, by a gate that compares them in turns: surer than the ratio of two medians."""

    def __post_init__(self) -> None:
        """Raise StoreError for a value that no measurement has: pages, pictures and tables compute with them."""
        least = {"time_us": LEAST_TIME_US, "limit_us": 0.0, "seconds": 0.0, "paired": 1 / MOST_TIME_US}
        values = [(name, getattr(self, name), low) for name, low in least.items()]
        values += [(f"time of {name}", x, LEAST_TIME_US) for name, x in self.others]
        # The host's time was measured apart and may exceed a whole call.
        for name, value, low in (*values, ("time of torch", self.torch_us, -MOST_TIME_US)):
            if value is not None and not (type(value) in (int, float) and low <= value <= MOST_TIME_US):
                raise StoreError(f"{name}: got {shown(value)}, expected {low:g} to {MOST_TIME_US:g}")
        names = (name for name, _ in self.others)
        for text in (self.text, self.name or "", *names, *(part for failure in self.failures for part in failure)):
            if not isinstance(text, str):
                raise StoreError(f"got {shown(text)}, expected a text")

    @property
    def problem(self) -> Problem | None:
        """The problem, None if another version wrote it or the file has only its text."""
        return stored_problem(self.key)

    @property
    def backend(self) -> str:
        """The backend of the pick."""
        return (self.name or "none").partition(":")[0]

    @property
    def speedup(self) -> float | None:
        """Time of torch divided by that of the pick. None if a busy machine explains it."""
        return 1 / self.paired if self.paired else credible_ratio(self.torch_us, self.time_us, self.disturbed)

    @property
    def unsure(self) -> bool:
        """True if both times are known, and a busy machine explains their ratio."""
        return self.speedup is None and bool(self.disturbed and self.time_us and self.torch_us)

    @property
    def share(self) -> float | None:
        """Share of the machine's limit that the pick reaches."""
        return _ratio(self.limit_us, self.time_us)

    def work(self) -> tuple[float, float] | None:
        """Return the least bytes and operations of the problem, None without a problem that has any."""
        problem = self.problem
        nbytes, flops = least_work(problem) if problem is not None else (0.0, 0.0)
        return (nbytes, flops) if nbytes and flops else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A problem with its entries in two files, None in a file that lacks it."""

    before: Entry | None
    after: Entry | None

    @property
    def either(self) -> Entry:
        """One of the two, the later if both are there."""
        entry = self.after or self.before
        assert entry is not None
        return entry

    @property
    def disturbed(self) -> str:
        """The disturbance of one side's measurement, "" if both were quiet."""
        return next((side.disturbed for side in (self.before, self.after) if side is not None and side.disturbed), "")

    @property
    def ratio(self) -> float | None:
        """Time after, divided by the time before."""
        times = [side.time_us if side else None for side in (self.before, self.after)]
        return times[1] / times[0] if times[0] and times[1] else None

    @property
    def slower(self) -> bool:
        """True if the time grew by more than a tie."""
        return (self.ratio or 0) > 1 + tie(self.disturbed)

    @property
    def faster(self) -> bool:
        """True if the time fell by more than a tie."""
        return (self.ratio or 1) < 1 - tie(self.disturbed)

    @property
    def differs(self) -> bool:
        """True for another pick, or a time that differs by more than a tie."""
        other = self.before is not None and self.after is not None and self.before.name != self.after.name
        return other or self.slower or self.faster

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        sides = {
            name: None if side is None else {"pick": side.name, "time_us": side.time_us, "disturbed": side.disturbed}
            for name, side in (("before", self.before), ("after", self.after))
        }
        entry = self.either
        return {"problem": {"text": entry.text} | json.loads(entry.key or "{}"), **sides, "ratio": self.ratio}


def pairs_of(before: Iterable[Entry], after: Iterable[Entry]) -> list[Pair]:
    """Return the pairs by problem and place. Where one file has no places, or no keys, the other's do not count.

    The latest entry counts where several share a problem and a place.
    """
    left, right = list(before), list(after)
    by_text = any(not entry.key for entry in (*left, *right))
    placed = all(entry.place for entry in (*left, *right))

    def known(entries: list[Entry]) -> Mapping[tuple[str, str], Entry]:
        ordered = sorted(entries, key=lambda entry: entry.measured_at)
        return {(entry.text if by_text else entry.key, entry.place if placed else ""): entry for entry in ordered}

    a, b = known(left), known(right)
    return [Pair(before=a.get(scope), after=b.get(scope)) for scope in sorted({*a, *b})]
