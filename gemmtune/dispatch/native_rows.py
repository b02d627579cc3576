"""Tables of every M in the native look-up: what it is told of their intervals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from ..choice import Choice, Kernel
from ..native.lookup import Run, rows_served
from ..problem import Problem
from ..problem.rows import following_operands
from .plan import Plan


def served_rows(number: int, plan: Plan, arguments: tuple[Any, ...]) -> bool:
    """Let the native look-up serve every M of the plan's table, for calls with arguments like these; whether it does from now on.

    ``number`` is of the generation in which the plan was looked up.
    """
    shared = plan.shared
    following = following_operands(shared.rows_class) if shared is not None and shared.table is not None else None
    if shared is None or following is None:
        return False

    def plan_at(proved_at: Callable[[int], tuple[Problem, Choice, Kernel] | None], m: int) -> Plan | None:
        found = proved_at(m)
        if found is None:
            return None
        problem, choice, kernel = found
        return Plan(problem=problem, choice=choice, kernel=kernel, origin="range", shared=shared)

    def runs() -> Iterator[Run]:
        for rows, proved_at in shared.runs():
            yield Run(rows=rows, plan_at=functools.partial(plan_at, proved_at))

    return rows_served(number, arguments, following, runs)
