"""Registration of tables of M with the native look-up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from ..choice import Choice, Kernel
from ..native.lookup import Run, rows_served
from ..problem import Problem
from ..problem.rows import following_operands
from .plan import Plan
from .ranges import RangePlan


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
