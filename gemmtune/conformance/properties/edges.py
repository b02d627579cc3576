"""Sizes: at the edges of tiles, and none at all."""

from __future__ import annotations

from collections.abc import Iterator

from ...dispatch.fused import NAMES
from ...problem.operations import BATCHED_OPS
from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.scope import Level, Scope
from ..cases.sizes import EDGES, fitting, plain_pairs
from .coverage import Sample, Size, fitted
from .property import Property
from .values import check_cancellation, expect_integers

__all__ = ["PROPERTIES"]

LONG = (2**13 + 3, 2**15 + 3, 2**16 + 3)
"""Past what an index of so many bits holds, and past the most blocks of a CUDA grid along its second dimension."""
_SHORT = (5, 8, 8)
_SMOKE = (5, 11)
"""How far the edges of N and of K are ahead of that of M, so that each size comes up once in each dimension."""


def check_edges(bench: Bench) -> None:
    """Cancelling integers: every element of a and b counts, the last of K most of all."""
    check_cancellation(bench)


def check_long(bench: Bench) -> None:
    """Cancelling integers; where K is long also dense small ones, of which the last of K counts in most elements."""
    check_cancellation(bench)
    if bench.problem.terms > max(bench.problem.m, bench.problem.n):
        expect_integers(bench, bench.probes.integers())


def check_empty(bench: Bench) -> None:
    """No rows, columns or matrices: a result of the right shape, which the call itself is judged by."""
    bench.call(bench.probes.integers())


def check_k_zero(bench: Bench) -> None:
    """An empty sum: beta · C, or zeros."""
    expect_integers(bench, bench.probes.integers())


def edge_shapes(scope: Scope) -> list[Size]:
    """Triples of EDGES: at smoke each size once in each dimension, else every pair of sizes in every two dimensions."""
    count = len(EDGES)
    if scope.level is Level.SMOKE:
        places = [(i, i + _SMOKE[0], i + _SMOKE[1]) for i in range(count)]
    else:
        places = [(i, j, i + j) for i in range(count) for j in range(count)]
    sizes = (tuple(EDGES[x % count] for x in place) for place in places)
    return list(dict.fromkeys(fitting(scope, *size) for size in sizes))


def _edge_cases(scope: Scope) -> Iterator[Case]:
    """Each triple for at least one operation and dtype, and these in turn."""
    contexts = sum(len(scope.tested_dtypes(op)) for op in scope.tested_ops)
    budget = (max(54, 3 * contexts), len(EDGES) ** 2 + contexts, 5000)
    return Sample(name="edges", budget=budget, shapes=edge_shapes)(scope)


def _long_cases(scope: Scope) -> Iterator[Case]:
    """Every long size once in every dimension; at smoke only the longest for all operations but the first."""
    for number, op in enumerate(scope.tested_ops):
        lengths = LONG if number == 0 or scope.level > Level.SMOKE else LONG[-1:]
        m, n, k = _SHORT
        sizes = [size for long in lengths for size in ((long, n, k), (m, long, k), (m, n, long))]
        dtypes = len(scope.tested_dtypes(op))
        each = -(-len(sizes) // max(dtypes, 1)) * dtypes
        yield from Sample(name="long", budget=(each, 2 * each, 4 * each), shapes=fitted(*sizes), ops=(op,))(scope)


def _empty_cases(scope: Scope) -> Iterator[Case]:
    sizes = ((0, 5, 7), (5, 0, 7), (0, 0, 3), (0, 7, 0), (7, 0, 0), (0, 0, 0))
    wanted = [size for size in sizes if _at_least(scope, size)]
    if wanted:
        yield from Sample(name="empty", budget=(32, 96, 200), shapes=lambda _: wanted)(scope)
    for op in scope.tested_ops:
        for dtype in scope.tested_dtypes(op) if op in BATCHED_OPS else ():
            for a, b in plain_pairs(scope)[:: 3 if scope.level is Level.SMOKE else 1]:
                m, n, k = fitting(scope, 5, 6, 7)
                case = Case(property_name="empty", op=op, dtype=dtype, batch=0, m=m, n=n, k=k, a=a, b=b, bias="mn")
                if scope.allows(case):
                    yield case


def _k_zero_cases(scope: Scope) -> Iterator[Case]:
    wanted = [size for size in ((5, 7, 0), (64, 64, 0), (1, 1, 0), (129, 40, 0)) if _at_least(scope, size)]
    if wanted:
        yield from Sample(name="k-zero", budget=(32, 96, 200), shapes=lambda _: wanted)(scope)
    sums = [op for op in scope.tested_ops if NAMES[op].second == "K2"]
    for name, dtype in ((op, dtype) for op in sums for dtype in scope.tested_dtypes(op)):
        m, n, other = fitting(scope, 33, 40, 65)
        for k, k2 in ((other, 0), (0, other)):
            case = Case(property_name="k-zero", op=name, dtype=dtype, m=m, n=n, k=k, k2=str(k2))
            if scope.allows(case):
                yield case


def _at_least(scope: Scope, size: Size) -> bool:
    rules = zip(size, scope.traits.least, scope.traits.multiples, strict=True)
    return all(s >= least and s % by == 0 for s, least, by in rules)


def _empty_needs(scope: Scope) -> str | None:
    m, n, _ = scope.traits.least
    batched = set(BATCHED_OPS) & set(scope.tested_ops)
    return None if batched or 0 in (m, n) else "M and N are declared to be at least 1, and there is no batch"


def _k_zero_needs(scope: Scope) -> str | None:
    return "K is declared to be at least 1" if scope.traits.least[2] else None


PROPERTIES = (
    Property(
        name="edges",
        meaning="sizes one below, at and one above those of tiles, in every combination of two",
        check=check_edges,
        cases=_edge_cases,
        drawn=True,
    ),
    Property(
        name="long",
        meaning="more than 2^13, 2^15 and 2^16 rows, columns and terms",
        check=check_long,
        cases=_long_cases,
    ),
    Property(
        name="empty",
        meaning="without rows, columns or matrices, an empty result of the right shape",
        check=check_empty,
        cases=_empty_cases,
        needs=_empty_needs,
    ),
    Property(
        name="k-zero",
        meaning="with nothing to sum, beta · C or zeros",
        check=check_k_zero,
        cases=_k_zero_cases,
        needs=_k_zero_needs,
    ),
)
