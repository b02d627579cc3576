"""Joined products that nobody measured: their default tables, and the decision by estimated times or by a rule."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ... import settings as settings_module
from ...backends.table import load
from ...choice import Choice
from ...device import detect
from ...dispatch.ranges import RangePlan, range_plan_for
from ...problem import Problem
from ...problem.rows import row_classes
from ...selector.predicted import ROWS
from ...selector.predictor import shipped_predictor
from ...threads import in_a_thread
from ..defaults import make_missing
from .horizontal import HorizontalFusion
from .report import Decision
from .stored_decisions import APART, StoredDecisions

DEVICES = ("cuda",)
"""Devices on which products are joined without a measurement. On a CPU a launch costs little, and few blocks fill every core."""
FEW_ROWS = 64
"""Rows up to which default tables join products without a margin, or without an estimate.

The weights take most of the time there. They have equal bytes in one product, which needs one launch and fills the GPU better.
``benchmarks/results`` has the times of 51 pairs of one and several products on an H100 and an H200, at 1, 16 and 64 rows, of
bfloat16, int8 and int4 weights: one product took 3 to 52% less time. Pairs for which it was slower are not recorded there.
"""
BY_ESTIMATE = "by estimate, not measured"
BY_RULE = "by rule for few rows, not measured"


@dataclass(frozen=True, slots=True)
class Running:
    """The choice that runs a product, and True if it was measured here."""

    choice: Choice
    measured: bool


def make_tables(fusions: Sequence[HorizontalFusion], device: torch.device) -> None:
    """Make the missing default tables for all columns of fusions on which ``decide`` may decide. They are made together."""
    if device.type not in DEVICES or settings_module.current().rows != "shared":
        return
    predictor, info = shipped_predictor(), detect(device)
    known = {x.problem: predictor is not None and predictor.knows(x.problem, info) for x in fusions}
    likely = [x.problem for x in fusions if known[x.problem] or (x.problem.m <= FEW_ROWS and not x.dynamic)]
    in_a_thread(functools.partial(make_missing, info, dict.fromkeys(likely)))


def decide(stored: StoredDecisions, whole: Problem, parts: Sequence[Problem], *, dynamic: bool) -> Decision:
    """Return ``joined`` if one product is likely to be faster than the separate ones.

    The product of all columns needs a choice that was verified here. Its estimated time must be less than the sum of the others, by
    as much as times of one kernel differ. With default tables and up to FEW_ROWS rows any gain suffices, and no estimate is needed.
    With a ``dynamic`` M it may not be slower by more than that at any M of its table.
    """
    known = _table_of(stored, whole)
    if stored.device.type not in DEVICES or (known is None and (dynamic or stored.pick(whole) is None)):
        return Decision(taken="", reason="not compared with one product of all columns")
    measured = any(x.measured for x in (_running(stored, part) for part in parts))
    few = whole.m <= FEW_ROWS and not measured
    apart_us, joined_us = _estimated(stored, whole, parts)
    if apart_us is None or joined_us is None:
        return _by_rule(len(parts), taken=few and not dynamic)
    times, least = (("apart", apart_us), ("joined", joined_us)), 0.0 if few else APART
    if joined_us >= (1 - least) * apart_us or (dynamic and not _at_every_m(stored, whole, parts)):
        return Decision(taken="", reason=f"one product of all columns is no faster {BY_ESTIMATE}", times_us=times)
    return Decision(taken="joined", reason=f"one product for {len(parts)} of the same input {BY_ESTIMATE}", times_us=times)


def _by_rule(count: int, *, taken: bool) -> Decision:
    if not taken:
        return Decision(taken="", reason="not compared with one product of all columns")
    return Decision(taken="joined", reason=f"one product for {count} of the same input {BY_RULE}")


def _at_every_m(stored: StoredDecisions, whole: Problem, parts: Sequence[Problem]) -> bool:
    """Return True if one product is estimated for every M from 2 on, and nowhere much slower."""
    classes = [row_classes(problem)[0] for problem in (whole, *parts)]
    for m in (m for m in ROWS if m > 1 and all(x.has(m) for x in classes)):
        apart_us, joined_us = _estimated(stored, classes[0].at(m), [x.at(m) for x in classes[1:]])
        if apart_us is None or joined_us is None or joined_us > (1 + APART) * apart_us:
            return False
    return True


def _estimated(stored: StoredDecisions, whole: Problem, parts: Sequence[Problem]) -> tuple[float | None, float | None]:
    """Return the predicted times of the separate products together and of the joined one, None where one is unknown.

    A kernel that was not measured near, which serves many rows only, has the time of its backend's model.
    """
    predictor = shipped_predictor()
    if predictor is None or not predictor.knows(whole, stored.device):
        return None, None

    def time_us(problem: Problem) -> float | None:
        choice = _running(stored, problem).choice
        found = predictor.time_us(problem, stored.device, choice)
        return choice.estimate_us if found is None and problem.m > FEW_ROWS else found

    times = [time_us(x) for x in (whole, *parts)]
    apart = [time_us for time_us in times[1:] if time_us is not None]
    return sum(apart) if len(apart) == len(parts) else None, times[0]


def _running(stored: StoredDecisions, problem: Problem) -> Running:
    """Return the choice that runs a product: its own pick, that of its table, or torch's operation."""
    if (pick := stored.pick(problem)) is not None:
        return Running(pick, True)
    known = _table_of(stored, problem)
    place = None if known is None or known.table is None else known.table.index(problem.m)
    if known is not None and known.table is not None and place is not None:
        measured, choice = known.table.segments[place] not in known.ruled, known.members[place].choice
        at = choice if isinstance(choice, str) else choice.at(problem, stored.device)
        if isinstance(at, Choice):
            return Running(at, measured)
    offered = load("aten").enumerate(problem, stored.device, stored.settings).choices
    return Running(next((x for x in offered if x.baseline), offered[0]), False)


def _table_of(stored: StoredDecisions, problem: Problem) -> RangePlan | None:
    """Return the plan of a problem's class if it has a table for this M."""
    known = range_plan_for(problem, stored.device, stored.settings) if stored.settings.rows == "shared" else None
    return known if known is not None and known.serves(problem.m) else None
