"""Scales, zero points and packed weights: each number where it belongs, in each form that is declared."""

from __future__ import annotations

from collections.abc import Iterator

from ...numerics.bounds import exact_limit
from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.scope import Scope
from ..labels import SCALES_OF
from .coverage import Sample, Size, fitted
from .probing import stage
from .property import Property

__all__ = ["PROPERTIES"]

_SIZES: tuple[Size, ...] = (
    (33, 40, 300), (64, 64, 256), (5, 48, 96), (130, 136, 130), (17, 300, 128), (1, 64, 512), (64, 1, 66), (48, 129, 31),
)  # fmt: skip
"""K below, at and above the elements that share a scale, and several times those; M and N beyond a block of 128."""
_STRIDES = ("row", "col", "row+3", "every2", "row@1")
"""Of scales and zero points."""


def check_scales(bench: Bench) -> None:
    """Single products with scales and zero points of any numbers, within a few roundings; then cancelling sums, whose scales are
    powers of two that no neighbour has. Random data where the strides do not let elements be chosen."""
    probes = bench.probes
    random = probes.random()
    if probes.free_a and bench.problem.scales:
        with stage(bench, "single products"):
            pick = probes.scaled_rows(random.b)
            if not bench.expect_pick(bench.call(pick.operands), pick, scaled=True):
                return
    if probes.free_a and probes.free_b:
        with stage(bench, "sums"):
            pick = probes.cancel(exact_limit(bench.problem, bench.claims))
            if not bench.expect_pick(bench.call(pick.operands), pick):
                return
    bench.expect(bench.call(random), random)


def _with_strides(case: Case) -> Case:
    """The variant is the place in the table."""
    return case.changed(inp=_STRIDES[int(case.variant)], variant="")


def _cases(scope: Scope) -> Iterator[Case]:
    yield from Sample(
        name="scales",
        budget=(96, 400, 2500),
        shapes=fitted(*_SIZES),
        variants=tuple(map(str, range(len(_STRIDES)))),
        ops=tuple(SCALES_OF),
        finish=_with_strides,
    )(scope)


def _needs(scope: Scope) -> str | None:
    return None if set(SCALES_OF) & set(scope.tested_ops) else f"none of {', '.join(SCALES_OF)} is tested"


PROPERTIES = (
    Property(
        name="scales",
        meaning="scales and zero points of every declared kind count, each for the elements that it is for",
        check=check_scales,
        cases=_cases,
        needs=_needs,
        drawn=True,
    ),
)
