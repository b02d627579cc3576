"""Values: exact probes, the error bound, the grade."""

from __future__ import annotations

from collections.abc import Iterator

from ..bench import Bench
from ..case import Case
from ..property import Property
from ..scope import Scope
from ..sizes import plain_pairs, shapes

__all__ = ["PROPERTIES"]


def check_bound(bench: Bench) -> None:
    """Random data within the error bound of the claimed arithmetic."""
    operands = bench.probes.random()
    bench.expect(bench.call(operands), operands)


def _every_shape(scope: Scope, name: str) -> Iterator[Case]:
    for op in scope.tested_ops:
        for dtype in scope.tested_dtypes(op):
            for m, n, k in shapes(scope):
                for a, b in plain_pairs(scope):
                    case = Case(property_name=name, op=op, dtype=dtype, m=m, n=n, k=k, a=a, b=b)
                    if scope.allows(case):
                        yield case


PROPERTIES = (
    Property(
        name="bound",
        meaning="random data within the error bound of the claimed arithmetic",
        check=check_bound,
        cases=lambda scope: _every_shape(scope, "bound"),
        drawn=True,
    ),
)
