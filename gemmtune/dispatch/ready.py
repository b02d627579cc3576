"""The plans that this process has made: a call looks here first, and has one made where there is none."""

import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from .. import settings as settings_module
from ..bounded import Bounded
from ..choice import Choice, Kernel
from ..native.lookup import Run, forget, rows_served
from ..problem import Problem
from ..problem.rows import following_operands
from .keys import without_rows
from .plan import Plan, Ready
from .ranges import RangePlan, forget_range_plans
from .strategies import make_plan

_CAPACITY = 65536
ready = Bounded[Hashable, Ready](_CAPACITY)
"""Plans by the key that a call reads off its operands in a microsecond (``keys.key_of``)."""
_by_rows = Bounded[Hashable, RangePlan](_CAPACITY)
"""Tables of M by the same key without M."""
_plans = Bounded[tuple[Problem, int, int], Plan](_CAPACITY)
"""Plans by problem, device index and settings: calls with other keys may state the same problem."""


@dataclass(slots=True)
class Generation:
    """The number of times that plans were forgotten. Whatever was derived from plans holds for one number."""

    number: int = 0


generation = Generation()


def forget_plans() -> None:
    """Drop every plan, so that the next call asks the store again."""
    generation.number += 1
    ready.clear()
    _by_rows.clear()
    _plans.clear()
    forget_range_plans()
    forget(generation.number)


def keep_ready(key: Hashable | None, entry: Ready | None) -> None:
    """Let calls with this key find the plan, if there are both."""
    if key is not None and entry is not None and entry.plan.lasting:
        ready[key] = entry
        shared = entry.plan.shared
        if shared is not None and entry is entry.plan and (rest := without_rows(key)) is not None:
            _by_rows[rest[0]] = shared


def ready_for_rows(key: Hashable) -> Plan | None:
    """Return the plan for a call with a new M by the table of its weight, which states and checks nothing; None without one."""
    rest = without_rows(key) if _by_rows else None
    shared = _by_rows.get(rest[0]) if rest is not None else None
    plan = _plan_at(shared, shared.proved, rest[1]) if shared is not None and rest is not None else None
    if plan is not None:
        ready[key] = plan
    return plan


def plan_for(problem: Problem, index: int) -> Plan:
    """Return the plan for a problem on device ``index`` (-1: CPU), tuned if the store has none and the settings allow it.

    Raises NoValidChoicesError or ErrorFromChoice if no choice works, or the pick cannot be loaded, without ``fallback_to_aten``.
    """
    settings = settings_module.current()
    key = (problem, index, settings.token)
    plan = _plans.get(key)
    if plan is None:
        plan = make_plan(problem, index, settings)
        if plan.lasting:
            _plans[key] = plan
    return plan


def served_rows(number: int, shared: RangePlan, arguments: tuple[Any, ...]) -> bool:
    """Let the native look-up serve every M of a table, for calls with such arguments. Return True if it does from now on.

    ``arguments`` are those of a call, or (input, weight, bias) of a layer's forward. ``number`` is the generation in which the
    table was found.
    """
    following = following_operands(shared.rows_class) if shared.table is not None else None
    return following is not None and rows_served(number, arguments, following, functools.partial(_runs, shared))


def _runs(shared: RangePlan) -> Iterator[Run]:
    for rows, proved_at in shared.runs():
        yield Run(rows=rows, plan_at=functools.partial(_plan_at, shared, proved_at))


def _plan_at(shared: RangePlan, proved_at: Callable[[int], tuple[Problem, Choice, Kernel] | None], m: int) -> Plan | None:
    found = proved_at(m)
    if found is None:
        return None
    problem, choice, kernel = found
    return Plan(problem=problem, choice=choice, kernel=kernel, origin="range", shared=shared)
