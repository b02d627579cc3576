"""Forced kernels of a ``multi``: one kernel for every M, verified before its first run at each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..choice import Choice, Status
from ..device import DeviceInfo
from ..dispatch.ranges import Member, RangePlan
from ..errors import NoValidChoicesError
from ..problem import Problem
from ..problem.rows import RowClass
from ..selector.candidates import row_of
from ..selector.measure import examine_alone
from ..selector.segments import MOST_ROWS, Segment, Table
from ..settings import Settings
from ..store.store import open_store
from .members import candidates_of

REMEDY = "Mend it, force another one (force=, GEMMTUNE_MULTI_KERNEL), or none: then the fastest of those that are right runs."


@dataclass(slots=True)
class Forced:
    """Plans by which one kernel of a ``multi`` serves every M. They are made when it is first forced.

    With ``verify``, a kernel that is not torch's own is verified, by the store or else here.
    """

    rows_class: RowClass
    device: DeviceInfo
    settings: Settings
    verify: bool
    plans: dict[str, RangePlan] = field(default_factory=dict)
    proved: set[tuple[str, Problem]] = field(default_factory=set)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.rows_class, self.device, self.settings, self.verify))

    def plan(self, choice: Choice, problem: Problem) -> RangePlan:
        """Return a kernel's plan, verified for this problem if legal. Raises NoValidChoicesError if it is wrong or cannot run."""
        at = choice.at(problem, self.device)
        if self.verify and isinstance(at, Choice) and not at.baseline and (at.name, problem) not in self.proved:
            self._prove(at)
            self.proved.add((at.name, problem))
        if choice.name not in self.plans:
            whole = Segment.of(choice, 1, MOST_ROWS, choice.problem.m)
            member = Member(self.rows_class, whole.sampled_m, self.device, lambda _: choice)
            self.plans[choice.name] = RangePlan(self.rows_class, [member], Table(segments=(whole,)), frozenset())
        return self.plans[choice.name]

    def _prove(self, choice: Choice) -> None:
        problem, store = choice.problem, open_store(self.settings)
        candidates = candidates_of([choice], problem, self.device, self.settings).stored(store)
        found = candidates.known.get(choice.content_hash)
        if found is None:
            found = examine_alone(candidates, choice)
            store.put([row_of(found, problem, candidates.fingerprint)])
        if found.status is not Status.OK:
            left_out = [(choice.name, str(found.status), found.reason)]
            raise NoValidChoicesError(f"{problem} by the one that is forced", left_out, REMEDY)
