"""Tables of every M in the native look-up: what it is told of their intervals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from ..choice import Choice, Kernel
from ..native.lookup import Run, layer_rows_served, rows_served
from ..problem import Problem
from ..problem.rows import following_operands
from .plan import Plan
from .ranges import RangePlan

_OF_INPUT = 1
"""The operands of a layer that have M rows, a bit for each: its input alone."""


def served_rows(number: int, plan: Plan, arguments: tuple[Any, ...]) -> bool:
    """Let the native look-up serve every M of the plan's table, for calls with arguments like these; whether it does from now on.

    ``number`` is of the generation in which the plan was looked up.
    """
    shared = plan.shared
    following = _following(shared) if shared is not None else None
    if shared is None or following is None:
        return False
    return rows_served(number, arguments, following, functools.partial(_runs, shared))


def served_layers(number: int, shared: RangePlan, operands: tuple[Any, ...]) -> bool:
    """The same for forwards of layers with (input, weight, bias) like these, and the table of their product."""
    return _following(shared) == _OF_INPUT and layer_rows_served(number, operands, functools.partial(_runs, shared))


def _following(shared: RangePlan) -> int | None:
    """The operands that follow M, a bit for each; None where there is no table, or Python binds each M."""
    return None if shared.table is None else following_operands(shared.rows_class)


def _runs(shared: RangePlan) -> Iterator[Run]:
    for rows, proved_at in shared.runs():
        yield Run(rows=rows, plan_at=functools.partial(_plan_at, shared, proved_at))


def _plan_at(shared: RangePlan, proved_at: Callable[[int], tuple[Problem, Choice, Kernel] | None], m: int) -> Plan | None:
    found = proved_at(m)
    if found is None:
        return None
    problem, choice, kernel = found
    return Plan(problem=problem, choice=choice, kernel=kernel, origin="range", shared=shared)
