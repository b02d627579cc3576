"""The table of a class of problems: the choice for each interval of M, and the Ms at which it was verified."""

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..choice import Choice
from ..errors import InvalidProblemError, StoreError
from ..store.row import Ranged

VERSION = 3
"""Version of the table format. A table of another version is ignored, and its range is tuned again."""
MOST_ROWS = 2**31 - 1
SAMPLED_M = "anchor"
"""Name of ``sampled_m`` in a stored table."""
_ROWS = ("checked", "kernels")
"""Fields of a segment that are tuples of Ms."""
TABLE = "segments"
INVARIANT = "invariant"
DEFAULT = "default"
FOR_GRAPHS = Ranged.FOR_GRAPHS
"""Kinds of records: the fastest choice of each interval, the fastest of one reduction class (the bits of a row do not depend on its
batch), and choices that were verified without a tuning: for weights, and for products that only a compiled graph has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The choice for ``lo`` to ``hi`` rows, found by ``content_hash`` among its ``backend``'s at ``sampled_m`` (``time_us``).

    ``checked`` are the Ms at which it was verified, ``kernels`` the first Ms of runs that share one compiled kernel.
    """

    lo: int
    hi: int
    name: str
    backend: str
    content_hash: str
    sampled_m: int
    time_us: float | None = None
    checked: tuple[int, ...] = ()
    kernels: tuple[int, ...] = ()

    @classmethod
    def of(cls, choice: Choice, lo: int, hi: int, sampled_m: int, **more: Any) -> "Segment":
        """Return the segment for ``choice``, which is found again among the choices for ``sampled_m`` rows."""
        return cls(
            lo=lo, hi=hi, name=choice.name, backend=choice.backend, content_hash=choice.content_hash, sampled_m=sampled_m, **more
        )  # fmt: skip

    def __str__(self) -> str:
        rows = str(self.lo) if self.lo == self.hi else f"{self.lo}..{self.hi}"
        return f"M = {rows}: {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Ordered segments without overlap. Gaps between them, and Ms beyond them, have no choice. ``seed`` drew the random Ms checked.
    ``disturbed`` says how other work disturbed the measurements; empty if none was seen. ``reduction`` is the class of all choices
    of an INVARIANT table; empty for others. ``origin`` of a table whose times were not measured here says what made it; its first
    word is ``rule``, ``timed``, ``predicted`` or ``shipped``.

    Raises:
        InvalidProblemError: there is no segment, one is empty, or two overlap.
    """

    segments: tuple[Segment, ...]
    seed: int = 0
    disturbed: str = ""
    reduction: str = ""
    origin: str = ""

    def __post_init__(self) -> None:
        if not self.segments:
            raise InvalidProblemError("rows: got a table without segments, expected at least one")
        for x in self.segments:
            check_interval(x.lo, x.hi)
        for x, y in pairwise(self.segments):
            if y.lo <= x.hi:
                raise InvalidProblemError(
                    f"rows: got segments {x.lo}..{x.hi} and {y.lo}..{y.hi}, which overlap or are out of order; expected "
                    "each to begin after the end of the one before"
                )

    @property
    def lo(self) -> int:
        """The smallest number of rows."""
        return self.segments[0].lo

    @property
    def hi(self) -> int:
        """The largest number of rows."""
        return self.segments[-1].hi

    def index(self, m: int) -> int | None:
        """Return the index of the segment for ``m`` rows. None if no segment covers it."""
        place = bisect.bisect_right(self.segments, m, key=lambda segment: segment.lo) - 1
        return place if place >= 0 and m <= self.segments[place].hi else None

    def covers(self, rows: Iterable[int]) -> bool:
        """Return True if the segments cover each of ``rows``."""
        return all(self.index(m) is not None for m in rows)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        names = Segment.__dataclass_fields__
        segments = [{SAMPLED_M if name == "sampled_m" else name: getattr(x, name) for name in names} for x in self.segments]
        more = {"reduction": self.reduction} if self.reduction else {}
        made = {"version": VERSION, "seed": self.seed, "disturbed": self.disturbed, "origin": self.origin}
        return made | {"segments": segments} | more

    @classmethod
    def of(cls, fact: Ranged) -> "Table":
        """Return the table of a store record. Raises StoreError if it is not what this version's ``to_json`` writes."""
        version = fact.value.get("version")
        if version != VERSION:
            raise StoreError(f"segments: got a table of version {version!r}, expected {VERSION}; tune the range again")
        try:
            segments = tuple(_segment(x) for x in fact.value["segments"])
            texts = {name: str(fact.value.get(name, "")) for name in ("disturbed", "origin", "reduction")}
            if fact.kind == INVARIANT and not texts["reduction"]:
                raise StoreError(
                    "segments: got a batch-invariant table without a reduction, of an older version; tune the range again"
                )
            return cls(segments=segments, seed=int(fact.value["seed"]), **texts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"segments: got a table that is damaged ({error}); tune the range again") from error


def _segment(data: Mapping[str, Any]) -> Segment:
    """Return a segment from plain values. Raises TypeError for values of other types."""
    values = {**data, **{name: tuple(data[name]) for name in _ROWS}}
    made = Segment(sampled_m=values.pop(SAMPLED_M), **values)
    texts, rows = (made.name, made.backend, made.content_hash), (made.sampled_m, *made.checked, *made.kernels)
    if not all(isinstance(x, str) for x in texts) or not all(type(x) is int and 1 <= x <= MOST_ROWS for x in rows):
        raise TypeError("a name is no text, or an M is no whole number")
    if not (made.time_us is None or isinstance(made.time_us, (int, float))):
        raise TypeError("a time is no number")
    return made


def check_interval(lo: object, hi: object) -> None:
    """Raise InvalidProblemError unless ``lo`` and ``hi`` are numbers of rows with ``lo`` <= ``hi``."""
    for value in (lo, hi):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_ROWS:
            raise InvalidProblemError(f"rows: got M = {value!r}, expected a whole number from 1 to {MOST_ROWS}")
    assert isinstance(lo, int)
    assert isinstance(hi, int)
    if hi < lo:
        raise InvalidProblemError(f"rows: got the empty range {lo}..{hi}, expected the smaller M first")


def rows_of(m: object) -> range:
    """Return ``m``, a range or (smallest, largest), as a range. Raises InvalidProblemError if it is neither or has M = 0."""
    if isinstance(m, range):
        if len(m) == 0 or m.step != 1:
            raise InvalidProblemError(f"m: got {m!r}, expected a range with step 1 that is not empty, such as range(1, 8193)")
        lo, hi = m.start, m.stop - 1
    elif isinstance(m, Sequence) and not isinstance(m, str) and len(m) == 2 and not any(isinstance(end, range) for end in m):
        lo, hi = m
    else:
        raise InvalidProblemError(f"m: got {m!r}, expected range(1, 8193), or (1, 8192)")
    check_interval(lo, hi)
    return range(lo, hi + 1)


def merged(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Merge neighbours with the same choice. The merged segment keeps the first ``sampled_m`` and all checked Ms."""
    found: list[Segment] = []
    for x in segments:
        last = found[-1] if found else None
        if last is not None and last.content_hash == x.content_hash and last.name == x.name and last.hi + 1 == x.lo:
            found[-1] = _joined(last, x)
        else:
            found.append(x)
    return tuple(found)


def _joined(x: Segment, y: Segment) -> Segment:
    values: Mapping[str, Any] = {name: getattr(x, name) for name in Segment.__dataclass_fields__}
    return Segment(**{**values, "hi": y.hi, **{name: tuple(sorted({*getattr(x, name), *getattr(y, name)})) for name in _ROWS}})


def extended(table: Table | None, rule: Table) -> tuple[Table, frozenset[Segment]]:
    """Return a table with the segments of the ``rule`` before and after it, and these segments. Without a table, the rule."""
    if table is None:
        return rule, frozenset(rule.segments)
    ruled = [part for x in rule.segments for part in outside(x, table)]
    segments = sorted((*table.segments, *ruled), key=lambda x: x.lo)
    return dataclasses.replace(table, segments=tuple(segments)), frozenset(ruled)


def outside(x: Segment, table: Table) -> list[Segment]:
    """Return the parts of a segment before and after a table."""
    before = dataclasses.replace(x, hi=min(x.hi, table.lo - 1))
    behind = dataclasses.replace(x, lo=max(x.lo, table.hi + 1))
    return [part for part in (before, behind) if part.lo <= part.hi]
