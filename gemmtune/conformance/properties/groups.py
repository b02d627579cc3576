"""Properties of grouped products: ends of groups, data next to a group, offsets that change in place."""

from __future__ import annotations

from typing import Any

from ...declaration.labels import GROUPED
from ...numerics.grouped import GroupedExpectation
from ..bench.bench import Bench
from ..cases.sampling import Sample, Size
from .property import Property, overwrite, stage, tested

SIZES: tuple[Size, ...] = ((64, 48, 40), (37, 33, 65), (130, 96, 129), (3, 40, 96), (257, 64, 64), (96, 130, 256))
PATTERNS = ("uneven", "even", "one_group_has_all", "empty_groups", "ends_early", "nothing")
NONE_TESTED = f"none of {', '.join(GROUPED)} is tested"


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


def check_changed(bench: Bench) -> None:
    """Check the same tensors again after changing the ends of the groups in place."""
    groups = bench.groups
    live = groups.integers("uneven", groups.patterns["uneven"])
    with stage(bench, "before any change"):
        if not bench.expect_that(bench.call(live.operands), live):
            return
    for name in ("one group has all", "empty groups", "even"):
        other = groups.integers(name, groups.patterns[name])
        overwrite(live.operands, other.operands)
        with stage(bench, f"groups changed in place: {name}"):
            if not bench.expect_that(bench.call(live.operands), other):
                return


def _property(name: str, meaning: str, check: Any, budget: tuple[int, int, int], **more: Any) -> Property:
    sample = Sample(budget=budget, shapes=SIZES, ops=GROUPED, **more)
    return Property(name, meaning, check, sample, needs=tested(GROUPED, NONE_TESTED))


PROPERTIES = (
    _property(
        "group-ends", "each group, uneven, empty, large or ending early, uses its own rows and terms",
        check_ends, (72, 300, 1500), variants=PATTERNS,
    ),
    _property(
        "group-one-hot", "rows of a with a single 1 give rows of their group's matrix, every bit of them", check_one_hot,
        (24, 80, 400), variants=PATTERNS[:4],
    ),
    _property("beside-groups", "NaN that only one group may read shows in no other", check_beside, (24, 80, 400)),
    _property(
        "group-bound", "random data within the error bound of the claimed arithmetic, for the terms of each group", check_bound,
        (24, 120, 600), variants=PATTERNS[:4],
    ),
    _property("changed-groups", "offsets count as they are when it is called", check_changed, (18, 60, 200)),
)  # fmt: skip
