"""Operands that share memory: mm(x, x), mm(x, x.t()), xᵀ x, views of one buffer that overlap."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...numerics.aliasing import Sharing, can_share, in_one_buffer
from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.statement import problem_of
from ..diagnose import DIFFERS, FIRST_CALL
from .coverage import Sample, Size, fitted
from .probing import made
from .property import Property

__all__ = ["PROPERTIES"]

SHARED = "wrong where operands share memory"
HOW: dict[str, Sharing] = {"start": "same start", "overlap": "overlapping"}
"""By variant."""
_SIZES: tuple[Size, ...] = ((64, 64, 64), (33, 33, 65), (48, 48, 48), (96, 40, 65), (65, 65, 65), (1, 40, 33), (40, 40, 128))
"""Most are square, or as wide as high, so that b may be a or the transposed a."""


def check_sharing(bench: Bench) -> None:
    """a, b, c, d and the added operand in one buffer, after the same numbers in buffers of their own."""
    problem, how = bench.problem, HOW[bench.case.variant or "start"]
    shared = in_one_buffer(problem, bench.probes.integers(), how, seed=bench.case.seed)
    if problem.a == problem.b and how == "same start":
        shared = dataclasses.replace(shared, b=shared.a)
    copies: dict[str, Any] = {
        name: made(getattr(problem, name), x) for name in ("a", "b", "c", "d", "inp") if (x := getattr(shared, name)) is not None
    }
    apart = dataclasses.replace(shared, **copies)
    if not bench.expect(bench.call(apart), apart, name="operands apart", exact=True):
        return
    noted = len(bench.failures)
    bench.expect(bench.call(shared), shared, name=f"operands in one buffer, {how}", exact=True)
    bench.failures[noted:] = [
        failure
        if failure.diagnosis in (DIFFERS, FIRST_CALL)
        else dataclasses.replace(failure, diagnosis=SHARED, also=(*((failure.diagnosis,) * bool(failure.diagnosis)), *failure.also))
        for failure in bench.failures[noted:]
    ]


def _can_share(case: Case) -> bool:
    return can_share(problem_of(case, "cpu"))


PROPERTIES = (
    Property(
        name="shared-operands",
        meaning="operands that are views of the same memory, as in mm(x, x) and mm(x, x.t())",
        check=check_sharing,
        cases=Sample(name="shared-operands", budget=(36, 100, 400), shapes=fitted(*_SIZES), variants=tuple(HOW), admits=_can_share),
    ),
)
