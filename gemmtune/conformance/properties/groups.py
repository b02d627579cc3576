"""Properties of grouped products: ends of groups, data next to a group, scales, offsets that change in place."""

import dataclasses
from typing import Any

from ...declaration.labels import GROUPED, SCALES_OF
from ...numerics.grouped import expectation_of
from ...numerics.grouped_expectation import GroupedExpectation
from ...problem.grouped_compositions import spans
from ..bench.bench import Bench
from ..cases.sampling import Sample, Size
from .property import Property, overwrite, stage, tested
from .scalars import far_from_1

SIZES: tuple[Size, ...] = ((64, 48, 40), (37, 33, 65), (130, 96, 129), (3, 40, 96), (257, 64, 64), (96, 130, 256))
SCALED_SIZES: tuple[Size, ...] = ((37, 33, 300), (64, 64, 256), (130, 136, 130), (17, 300, 128), (5, 48, 512), (48, 129, 64))
"""K below, at and above the number of terms that share a scale. M and N exceed 128."""
PATTERNS = ("uneven", "even", "one_group_has_all", "empty_groups", "ends_early", "nothing")
NONE_TESTED = f"none of {', '.join(GROUPED)} is tested"
SCALED = tuple(op for op in GROUPED if op in SCALES_OF)
NO_SCALES = f"none of {', '.join(SCALED)} is tested"


def _ends(bench: Bench) -> list[int]:
    return bench.groups.patterns[bench.case.variant.replace("_", " ") or "uneven"]


def _expect(bench: Bench, expectation: GroupedExpectation | None) -> bool:
    """Judge one call by an expectation. If strides or sizes allow no such operands, use small integers instead."""
    expectation = expectation if expectation is not None else bench.groups.next_integers()
    return bench.expect_that(bench.call(expectation.operands), expectation)


def check_ends(bench: Bench) -> None:
    """Check small integers that differ between groups. The variant sets where groups end."""
    _expect(bench, bench.groups.integers(bench.case.variant.replace("_", " "), _ends(bench)))


def check_one_hot(bench: Bench) -> None:
    """Check rows of a with a single 1, placed in each group's own range of K if groups divide K. Rows of b must keep every bit."""
    _expect(bench, bench.groups.one_hot(_ends(bench)))


def check_beside(bench: Bench) -> None:
    """Check that NaN after the last group, and at the ends of one group, reaches no other group."""
    _expect(bench, bench.groups.poisoned(bench.groups.patterns["ends early"]))


def check_bound(bench: Bench) -> None:
    """Check random numbers within the error bound of each group's sums."""
    _expect(bench, bench.groups.random(_ends(bench)))


def check_scales(bench: Bench) -> None:
    """Check powers of two as scales, which differ between neighbours, then scales of any numbers, and some far from 1."""
    groups, ends = bench.groups, _ends(bench)
    with stage(bench, "powers of two"):
        _expect(bench, groups.integers("powers of two", ends))
    random = groups.random(ends)
    if not _expect(bench, random) or (far := far_from_1(bench.problem, random.operands)) is None:
        return
    with stage(bench, "scales far from 1"):
        far = dataclasses.replace(far, out=random.operands.out)
        _expect(bench, expectation_of(bench.problem, far, spans(ends, bench.problem.m), name="random"))


def check_changed(bench: Bench) -> None:
    """Check the same tensors again after changing the ends of the groups in place."""
    groups = bench.groups
    live = groups.integers("uneven", groups.patterns["uneven"])
    with stage(bench, "before any change"):
        bench.expect_that(bench.call(live.operands), live)
    for name in ("one group has all", "empty groups", "even"):
        other = groups.integers(name, groups.patterns[name])
        overwrite(live.operands, other.operands)
        with stage(bench, f"groups changed in place: {name}"):
            bench.expect_that(bench.call(live.operands), other)


def _property(name: str, meaning: str, check: Any, budget: tuple[int, int, int], least: int, **more: Any) -> Property:
    """Return a property with at least ``least`` cases of each operation and dtype."""
    sample = Sample(budget=budget, least=least, **{"shapes": SIZES, "ops": GROUPED, **more})
    return Property(name, meaning, check, sample, needs=tested(sample.ops, NONE_TESTED if sample.ops == GROUPED else NO_SCALES))


PROPERTIES = (
    _property(
        "group-ends", "each group, uneven, empty, large or ending early, uses its own rows and terms",
        check_ends, (72, 300, 1500), 6, variants=PATTERNS,
    ),
    _property(
        "group-one-hot", "rows of a with a single 1 give rows of their group's matrix, every bit of them", check_one_hot,
        (24, 80, 400), 4, variants=PATTERNS[:4],
    ),
    _property("beside-groups", "NaN that only one group may read shows in no other", check_beside, (24, 80, 400), 3),
    _property(
        "group-bound", "random data within the error bound of the claimed arithmetic, for the terms of each group", check_bound,
        (24, 120, 600), 4, variants=PATTERNS[:4],
    ),
    _property(
        "group-scales", "scales of every declared kind count, each for the elements of its group", check_scales, (48, 160, 800), 6,
        shapes=SCALED_SIZES, ops=SCALED, variants=PATTERNS[:4],
    ),
    _property("changed-groups", "offsets count as they are when it is called", check_changed, (18, 60, 200), 3),
)  # fmt: skip
