"""Batches: each matrix of a batch gets its own product."""

from __future__ import annotations

from collections.abc import Iterator

from ...problem.operations import BATCHED_OPS
from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.scope import Level, Scope
from .coverage import Sample, Size, fitted
from .probing import exact_probe
from .property import Property

__all__ = ["PROPERTIES"]

_SIZES: tuple[Size, ...] = ((33, 40, 47), (64, 64, 64), (1, 96, 65), (16, 1, 31))
BATCHES = ("1", "2", "17", "5")
MOST_BLOCKS = 65535
"""Of a CUDA grid along its second and third dimension: a larger batch needs more than one launch, or another order."""
_STRIDES = ("row", "row~0", "col", "row~1", "col+8~1", "col~0", "row+1@1~1")


def check_batch(bench: Bench) -> None:
    """Other numbers in each matrix of the batch; the same ones where a batch stride is 0."""
    probe = exact_probe(bench)
    probe.judge(bench, bench.call(probe.operands))


def _cases(scope: Scope) -> Iterator[Case]:
    yield from Sample(
        name="batch",
        budget=(48, 240, 1200),
        shapes=fitted(*_SIZES),
        pairs=lambda _: [(a, b) for a in _STRIDES for b in _STRIDES],
        variants=BATCHES,
        admits=lambda case: case.batched,
        finish=lambda case: case.changed(batch=int(case.variant), variant=""),
    )(scope)
    if scope.level >= Level.FULL:
        yield from Sample(
            name="batch",
            budget=(0, 2, 8),
            shapes=fitted((8, 8, 8)),
            admits=lambda case: case.batched,
            finish=lambda case: case.changed(batch=MOST_BLOCKS + 2),
        )(scope)


def _needs(scope: Scope) -> str | None:
    return None if set(BATCHED_OPS) & set(scope.tested_ops) else "neither bmm nor baddbmm is tested"


PROPERTIES = (
    Property(
        name="batch",
        meaning="each matrix of a batch gets its own product, whatever the batch strides",
        check=check_batch,
        cases=_cases,
        needs=_needs,
        drawn=True,
    ),
)
