"""Properties of sizes: at the edges of tiles, long, empty, and of whole tiles without masks, where kernels have their main path."""

from collections.abc import Iterator, Sequence

import torch

from ...declaration.labels import OPS, ROWS, SINGLE
from ...declaration.layouts import PLAIN
from ...numerics.expectation import Referenced
from ...numerics.reference import Region, reference
from ...problem.operations import BATCHED_OPS
from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.sampling import EDGES, Sample, Size, fitting, plain_pairs, residues
from ..cases.scope import Level, Scope
from .property import Property, tested
from .values import check_cancellation, check_integers, check_one_hot_a, check_one_hot_b

LONG = (2**13 + 3, 2**15 + 3, 2**16 + 3)
"""Sizes above what 13, 15 and 16 bits index. The last also exceeds a CUDA grid's limit along its second dimension."""
TILED: Size = (2100, 2200, 16)
"""Sizes with more 128x128 tiles than a GPU has multiprocessors. 8 does not divide the tiles along M, and edge tiles are partial."""
BETWEEN: tuple[Size, ...] = (
    (4, 96, 384), (5, 9, 192), (6, 192, 24), (9, 4, 768), (10, 48, 96), (11, 5, 1536), (12, 6, 320), (13, 10, 640), (14, 24, 12),
    (20, 11, 6), (24, 12, 448), (48, 13, 4), (96, 14, 5), (192, 20, 10), (1, 40, 2048), (40, 1, 2048), (1, 1, 4096),
    *residues(96),
)  # fmt: skip
"""Sizes far from the edges of most tiles: each small number of rows and columns, three times powers of 2, long single rows and
columns, and every remainder of 16. Such sizes have kernels of their own."""
SMOKE_PLACES = (0, 5, 11)
"""Start positions of M, N and K in EDGES at smoke. They differ, so that each size occurs once in each dimension."""
WHOLE_TILES: tuple[Size, ...] = ((512, 512, 512),)
MORE_TILES: tuple[Size, ...] = ((640, 512, 768), (512, 768, 640), (1024, 1024, 1024), (768, 1280, 512), (513, 769, 514))
EVERY = 17
"""Distance of the rows that are compared with a reference: some in each tile, at another place in each."""
GROUPS = 2
"""Groups of a grouped product. Each has as many rows, or terms, as another operation's product."""
NEVER_EMPTY = "M and N are declared to be at least 1, and there is no batch"


def check_long(bench: Bench) -> None:
    """Check cancelling integers. If K is long, also check dense small ones, whose last terms count in most elements."""
    check_cancellation(bench)
    if bench.problem.terms > max(bench.problem.m, bench.problem.n):
        check_integers(bench)


def check_empty(bench: Bench) -> None:
    """Check that a product without rows, columns or matrices has a result of the right shape, which ``Bench.call`` judges."""
    bench.call(bench.probes.integers())


def edge_shapes(scope: Scope) -> list[Size]:
    """Return triples of EDGES: each size once in each dimension at smoke, else every pair of sizes in every two dimensions."""
    numbers, count = range(len(EDGES)), len(EDGES)
    places = [(i, j, i + j) for i in numbers for j in numbers]
    if scope.level is Level.SMOKE:
        m, n, k = SMOKE_PLACES
        places = [(i + m, i + n, i + k) for i in numbers]
    return [(EDGES[m % count], EDGES[n % count], EDGES[k % count]) for m, n, k in places]


def _edges(name: str, scope: Scope) -> Iterator[Case]:
    """Yield each triple for at least one operation and dtype, which alternate."""
    contexts = sum(len(scope.tested_dtypes(op)) for op in scope.tested_ops if op in SINGLE)
    budget = (max(54, 3 * contexts), len(EDGES) ** 2 + contexts, 5000)
    yield from Sample(budget=budget, shapes=edge_shapes, ops=SINGLE)(name, scope)
    budget = (len(BETWEEN) + contexts, 3 * len(BETWEEN) + contexts, contexts * len(BETWEEN))
    yield from Sample(budget=budget, shapes=BETWEEN, ops=SINGLE)(name, scope)


def _long(name: str, scope: Scope) -> Iterator[Case]:
    """Yield every long size once in every dimension, and TILED for the first operation. At smoke others get the longest only."""
    for number, op in enumerate(op for op in scope.tested_ops if op in SINGLE):
        lengths = LONG if number == 0 or scope.level > Level.SMOKE else LONG[-1:]
        sizes = tuple(size for long in lengths for size in ((long, 8, 8), (5, long, 8), (5, 8, long))) + (TILED,) * (number == 0)
        dtypes = len(scope.tested_dtypes(op))
        each = -(-len(sizes) // max(dtypes, 1)) * dtypes
        yield from Sample(budget=(each, 2 * each, 4 * each), shapes=sizes, ops=(op,))(name, scope)


def _empty(name: str, scope: Scope) -> Iterator[Case]:
    yield from _of_sizes(name, scope, ((0, 5, 7), (5, 0, 7), (0, 0, 3), (0, 7, 0), (7, 0, 0), (0, 0, 0)))
    m, n, k = fitting(scope, 5, 6, 7)
    for op in scope.tested_ops:
        for dtype in scope.tested_dtypes(op) if op in BATCHED_OPS else ():
            for a, b in plain_pairs(scope)[:: 3 if scope.level is Level.SMOKE else 1]:
                case = Case(property_name=name, op=op, dtype=dtype, batch=0, m=m, n=n, k=k, a=a, b=b, bias="mn")
                if scope.allows(case):
                    yield case


def _k_zero(name: str, scope: Scope) -> Iterator[Case]:
    yield from _of_sizes(name, scope, ((5, 7, 0), (64, 64, 0), (1, 1, 0), (129, 40, 0)))
    m, n, other = fitting(scope, 33, 40, 65)
    for op in scope.tested_ops:
        for dtype in scope.tested_dtypes(op) if ROWS[op].second == "K2" else ():
            for k, k2 in ((other, 0), (0, other)):
                case = Case(property_name=name, op=op, dtype=dtype, m=m, n=n, k=k, k2=str(k2))
                if scope.allows(case):
                    yield case


def _of_sizes(name: str, scope: Scope, sizes: tuple[Size, ...]) -> Iterator[Case]:
    """Yield cases of the sizes that the traits allow without a change."""
    wanted = tuple(size for size in sizes if fitting(scope, *size) == size)
    variants = ("", {"out": "row"})
    return Sample(budget=(32, 96, 200), shapes=wanted, variants=variants, ops=SINGLE)(name, scope) if wanted else iter(())


def check_tiles(bench: Bench) -> None:
    """Check single products of full significands in rows, then columns: lost or repeated terms. Then check whole random rows."""
    if bench.problem.groups:
        _check_groups(bench)
        return
    for check in (check_one_hot_a, check_one_hot_b, _check_rows):
        check(bench)
        if bench.failures:
            return


def _check_rows(bench: Bench) -> None:
    operands = bench.probes.random()
    rows = torch.arange(0, bench.problem.m, EVERY, device=bench.device)
    some = (reference(operands, Region(rows=rows)),)
    bench.expect_that(bench.call(operands), Referenced(name="some rows of random data", operands=operands, references=some))


def _check_groups(bench: Bench) -> None:
    groups = bench.groups
    ends = groups.patterns["even"]
    for make in (groups.one_hot, groups.random):
        expectation = make(ends)
        if expectation is not None and not bench.expect_that(bench.call(expectation.operands), expectation):
            return


def _sizes(scope: Scope) -> Sequence[Size]:
    return WHOLE_TILES if scope.level is Level.SMOKE else (*WHOLE_TILES, *MORE_TILES)


def _whole(case: Case) -> Case:
    """Return ``case`` with half of the blocks of a sparse weight, one matrix of a batch, or groups of the given sizes."""
    if case.sparsity is not None:
        return case.changed(blocks=f"{case.sparsity.sides}@0.5")
    if case.batched:
        return case.changed(batch=1)
    if not case.row.grouped:
        return case
    divided = {"k": case.k * GROUPS} if case.row.out[0] == "G" else {"m": case.m * GROUPS // int(case.each or 1)}
    return case.changed(groups=str(GROUPS), **divided)


PROPERTIES = (
    Property(
        "edges", "sizes one below, at and one above those of tiles, in every combination of two; some between those",
        check_cancellation, _edges, drawn=True,
    ),
    Property("long", "more than 2^13, 2^15 and 2^16 rows, columns and terms; hundreds of tiles", check_long, _long),
    Property(
        "empty", "without rows, columns or matrices, an empty result of the right shape", check_empty, _empty,
        needs=lambda scope: None if 0 in scope.traits.least[:2] else tested(BATCHED_OPS, NEVER_EMPTY)(scope),
    ),
    Property(
        "k-zero", "with nothing to sum, beta · C or zeros", check_integers,
        _k_zero, needs=lambda scope: "K is declared to be at least 1" if scope.traits.least[2] else None,
    ),
    Property(
        "full-tiles", "products of several whole tiles in every dimension", check_tiles,
        Sample(budget=(0, 120, 600), shapes=_sizes, ops=OPS, admits=lambda case: {case.a, case.b} <= {PLAIN, "col"}, finish=_whole),
    ),
)  # fmt: skip
