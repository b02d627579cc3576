"""Property of products that are large in every dimension at once, where kernels have their main path: whole tiles, no masks."""

from collections.abc import Sequence

import torch

from ...declaration.labels import OPS
from ...declaration.layouts import PLAIN
from ...numerics.expectation import Referenced
from ...numerics.reference import Region, reference
from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.sampling import Sample, Size
from ..cases.scope import Level, Scope
from .property import Property
from .values import check_one_hot_a, check_one_hot_b

SMOKE: tuple[Size, ...] = ((512, 512, 512),)
MORE: tuple[Size, ...] = ((640, 512, 768), (512, 768, 640), (1024, 1024, 1024), (768, 1280, 512), (513, 769, 514))
EVERY = 17
"""Distance of the rows that are compared with a reference: some in each tile, at another place in each."""
GROUPS = 2
"""Groups of a grouped product. Each has as many rows, or terms, as another operation's product."""


def check_tiles(bench: Bench) -> None:
    """Check single products of full significands, in rows then in columns, and some whole rows of random data within the bound.

    A single product shows terms that are lost, or taken twice. All elements are compared, and no product is made for them.
    """
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
    return SMOKE if scope.level is Level.SMOKE else (*SMOKE, *MORE)


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


def _free(case: Case) -> bool:
    return {case.a, case.b} <= {PLAIN, "col"}


PROPERTIES = (
    Property(
        "full-tiles", "products of several whole tiles in every dimension", check_tiles,
        Sample(budget=(0, 120, 600), shapes=_sizes, ops=OPS, admits=_free, finish=_whole),
    ),
)  # fmt: skip
