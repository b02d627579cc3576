"""Look-up of the kernel for a call's M: by the table of the weight, or by the pick of the nearest tuned M."""

import bisect
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ..choice import Choice, Kernel
from ..device import DeviceInfo
from ..errors import InvalidProblemError
from ..filters import why_not_named
from ..problem import Problem
from ..problem.rows import Relaid, RowClass, row_classes
from ..selector.candidates import candidates_for, choice_of, timings_of
from ..selector.offers import enabled_backends
from ..selector.ranges import kind_of
from ..selector.segments import DEFAULT, FOR_GRAPHS, Segment, Table, extended
from ..selector.stored_tables import stored_table
from ..settings import Settings, Timing
from ..store.key import fingerprint_text
from ..store.store import Store, open_store
from .absent import announce_outdated, offered_anywhere
from .asked import command, tuned_rows
from .member import Member, members_of

NEAREST = 2
"""Number of tuned M, nearest first, whose choices are tried for another M."""

Origin = Literal["store", "tuned", "only choice", "range", "default", "nearest", "fallback"]
"""Source of the choice of a plan."""


Stored = tuple[Timing, tuple[Table, str]]
"""A stored table and the time of its measurement, after the timing mode of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Choice and kernel of a call, and their origin."""

    choice: Choice
    kernel: Kernel
    origin: Origin


class RangePlan:
    """Members for intervals of M of one class of problems, and the M that were tuned individually.

    With a ``table``, the member of its segment serves an M, and beyond the table that of the last segment. Without one, the member
    that was tuned for the nearest M does. ``tuned`` are the M whose own picks take precedence: all without a measured table, those
    beyond it, and those measured after it. ``ruled`` are the segments whose choices were verified and not measured.
    """

    def __init__(
        self,
        rows_class: RowClass,
        members: Sequence[Member],
        table: Table | None,
        tuned: frozenset[int],
        *,
        ruled: frozenset[Segment] = frozenset(),
    ) -> None:
        self.rows_class = rows_class
        self.ruled = ruled
        self.table = table
        self.tuned = tuned
        self.members = members
        self._loaded = table is None
        self._relaid: Relaid | None = None
        if table is not None:
            with contextlib.suppress(InvalidProblemError):
                self._relaid = Relaid(rows_class)

    @property
    def _by_segment(self) -> Iterator[tuple[Member, Segment]]:
        return zip(self.members, () if self.table is None else self.table.segments, strict=self.table is not None)

    @property
    def by_rule(self) -> bool:
        """True for a table of which nothing was measured."""
        return self.table is not None and self.ruled.issuperset(self.table.segments)

    def lost(self, device: DeviceInfo, settings: Settings) -> str:
        """Return why a choice of the table that the settings allow cannot run: another version, or an emptied cache. Else ""."""
        enabled = enabled_backends(device, settings)
        for member, x in self._by_segment:
            if x.backend in enabled and why_not_named(x.name, x.backend, settings) is None:
                for m in x.kernels:
                    at = member.choice if isinstance(member.choice, str) else member.choice.at(self.rows_class.at(m), device)
                    if isinstance(at, str) or not at.compiled:
                        return at if isinstance(at, str) else f"the kernel of {x.name} is not in the cache"
        return ""

    def outdated(self, device: DeviceInfo, settings: Settings) -> str:
        """Return the name of a measured choice that the settings allow, and that only another version of gemmtune has. Else ""."""
        enabled = enabled_backends(device, settings)
        for member, x in self._by_segment:
            allowed = x.backend in enabled and why_not_named(x.name, x.backend, settings) is None
            if allowed and x not in self.ruled and not member.found:
                at = self.rows_class.at(x.sampled_m)
                if offered_anywhere(x.content_hash, x.backend, at, device, settings) is None:
                    return x.name
        return ""

    def load(self) -> None:
        """Load the kernels of all segments, once. The first call of a weight does it, so that no later call has to."""
        if not self._loaded:
            self._loaded = True
            for member, segment in self._by_segment:
                member.load(segment.kernels)

    def serves(self, m: int) -> bool:
        """Return True if the table covers an M."""
        return self.table is not None and self.table.index(m) is not None

    def find(self, problem: Problem) -> Found | str:
        """Return the kernel for a problem of the class, or the reason why torch runs."""
        self.load()
        reason = "no choice is known" if self.table is None else f"the table has no choice for M = {problem.m}"
        for member in self._candidates(problem.m):
            found = member.bound(problem)
            if not isinstance(found, str):
                choice, kernel = found
                return Found(choice=choice, kernel=kernel, origin=self._origin(problem.m))
            reason = found
        return reason

    def _origin(self, m: int) -> Origin:
        if self.table is None:
            return "nearest"
        place = self.table.index(m)
        return "default" if self.table.segments[-1 if place is None else place] in self.ruled else "range"

    def proved(self, m: int) -> tuple[Problem, Choice, Kernel] | None:
        """Return the kernel for an M within the table, by arithmetic alone, or None if legality needs ``find``."""
        place = self.table.index(m) if self.table is not None and m > 1 and m not in self.tuned else None
        if place is None or self.table is None or self._relaid is None:
            return None
        self.load()
        starts = self.table.segments[place].kernels
        before = bisect.bisect_right(starts, m)
        return self._proved_at(self.members[place], starts[before - 1], m) if before else None

    def runs(self) -> Iterator[tuple[range, Callable[[int], tuple[Problem, Choice, Kernel] | None]]]:
        """Yield each interval of M ≥ 2 that one loaded kernel serves, with a function that returns the kernel for an M."""
        self.load()
        for member, segment in self._by_segment:
            for start, behind in pairwise((*segment.kernels, segment.hi + 1)):
                for rows in without(range(max(start, segment.lo, 2), behind), self.tuned):
                    if member.ready_at(start) and (legal := self.rows_class.within(rows)):
                        yield legal, functools.partial(self._proved_at, member, start)

    def _proved_at(self, member: Member, start: int, m: int) -> tuple[Problem, Choice, Kernel] | None:
        problem = self._relaid.at(m) if self._relaid is not None else self.rows_class.at(m)
        found = member.proved(problem, start)
        return None if found is None else (problem, *found)

    def _candidates(self, m: int) -> Sequence[Member]:
        if self.table is None:
            return sorted(self.members, key=lambda member: abs(math.log(m / member.sampled_m)))[:NEAREST]
        place = self.table.index(m)
        if place is None and m < self.table.lo:
            return ()
        last = self.members[-1].choice
        if place is None and self.table.reduction and not (isinstance(last, Choice) and last.batch_invariant):
            return ()  # the bits were compared up to here, and the last choice promises them for no other M
        return (self.members[-1 if place is None else place],)


def without(rows: range, others: Collection[int]) -> Iterator[range]:
    """Return the intervals of ``rows`` between the values in ``others``."""
    edges = [rows.start - 1, *sorted(m for m in others if m in rows), rows.stop]
    return (range(before + 1, behind) for before, behind in pairwise(edges) if behind - before > 1)


_plans: dict[tuple[str, DeviceInfo, int], RangePlan | None] = {}


def forget_range_plans() -> None:
    """Drop the plans of every class, so that the next call reads the store again."""
    _plans.clear()


def range_plan_for(problem: Problem, device: DeviceInfo, settings: Settings) -> RangePlan | None:
    """Return the plan of a class that contains the problem, or None."""
    for rows_class in row_classes(problem):
        key = (rows_class.key, device, settings.token)
        if key not in _plans:
            _plans[key] = _made(rows_class, device, settings)
        plan = _plans[key]
        if plan is not None:
            return plan
    return None


def _made(rows_class: RowClass, device: DeviceInfo, settings: Settings) -> RangePlan | None:
    """Make the plan by the table of the settings' timing mode, or else by that of the other mode. The rule serves other Ms.

    A table of another version of gemmtune is as good as none.
    """
    store = open_store(settings)

    def stored(kind: str) -> Stored | None:
        timings = timings_of(settings)
        found = ((timing, stored_table(rows_class, fingerprint_text(device, timing), store, kind)) for timing in timings)
        return next(((timing, table) for timing, table in found if table is not None), None)

    measured = stored(kind_of(settings))
    rule = None if settings.batch_invariant else stored(DEFAULT) or stored(FOR_GRAPHS)
    made = _joined(measured, rule, rows_class, device, settings, store)
    if measured is None or made is None or made.table is None or not (name := made.outdated(device, settings)):
        return made
    announce_outdated(rows_class, name, command(rows_class, made.table.hi, batch_invariant=settings.batch_invariant))
    return _joined(None, rule, rows_class, device, settings, store)


def _joined(
    measured: Stored | None, rule: Stored | None, rows_class: RowClass, device: DeviceInfo, settings: Settings, store: Store
) -> RangePlan | None:
    """Make the plan of a measured table and of the rule around it, or of the tuned Ms without either."""
    timing, (table, measured_at) = measured or rule or (settings.timing, (None, ""))
    ruled = frozenset[Segment]()
    if rule is not None and table is not None:
        table, ruled = extended(table if measured else None, rule[1][0])
    known = None if table is None else (table, measured_at if measured else "")
    by = settings if timing == settings.timing else dataclasses.replace(settings, timing=timing)
    return _of(known, rows_class, device, by, store, ruled)


def _of(
    known: tuple[Table, str] | None,
    rows_class: RowClass,
    device: DeviceInfo,
    settings: Settings,
    store: Store,
    ruled: frozenset[Segment],
) -> RangePlan | None:
    machine = fingerprint_text(device, settings.timing)
    tuned = {} if settings.batch_invariant else tuned_rows(rows_class, machine, store)

    if known is None:

        def picked(problem: Problem) -> Choice | str:
            found = candidates_for(problem, device, settings).stored(store).picked
            return found or f"nothing right is known of {problem}"

        members = [Member(rows_class, m, device, picked) for m in tuned]
        return RangePlan(rows_class, members, None, frozenset(tuned)) if members else None
    table, measured_at = known
    own = {
        m
        for m, key in tuned.items()
        if table.index(m) is None or any(row.measured_at > measured_at for row in store.rows(key, machine).values())
    }

    def found(x: Segment, problem: Problem) -> Choice | None:
        return choice_of(x.content_hash, x.backend, problem, device, settings, name=x.name)

    return RangePlan(rows_class, members_of(table, rows_class, device, found), table, frozenset(own), ruled=ruled)
