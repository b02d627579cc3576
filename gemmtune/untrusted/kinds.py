"""Kinds of calls by the operands that they get."""

import dataclasses
import random

from ..numerics.expectation import Expectation
from ..numerics.operands import Operands
from .checks import Checker
from .variations import NEARBY, RELATIONS, alike, nearby, one_changed, related

KINDS = ("fresh", "fresh", "exact", "fresh", "alike", "fresh", "moved", "left", "fresh", "right", "one", "near", "related")
"""Kinds of calls. They come in another order each time, but the call after an exact one is fresh: others change the call before.

fresh: new numbers. exact: new numbers whose result is known bit by bit. alike: the numbers of the call before in another order,
at the same addresses. moved: the same numbers at other addresses. left, right: a new a, or a new b, with the other one as before.
one: the same numbers with one changed in a and in b. near: the same numbers, each of a, of b or of both a little larger.
related: a or b is a multiple of itself or is rolled, but for one number.
"""
FIRST = ("fresh", "fresh")
"""Kinds of the first calls, at the same addresses: an earlier result is wrong for the second call, too."""
CHANGING = ("alike", "one", "near", "related")
"""Kinds that change the numbers of the call before in their place."""


def order(count: int, rng: random.Random) -> list[str]:
    """Return the kinds of so many calls."""
    kinds = [*FIRST]
    while len(kinds) < count:
        drawn = rng.sample(KINDS, len(KINDS))
        drawn.remove("fresh")
        place = drawn.index("exact") + 1
        kinds += [*drawn[:place], "fresh", *drawn[place:]]
    return kinds[:count]


def operands_of(kind: str, kept: Operands | None, checker: Checker, rng: random.Random) -> tuple[Operands, Expectation | None]:
    """Return the operands of a call of this kind, and what is known of its result. ``kept`` are those of an earlier call."""
    if kind == "exact" and (known := checker.exact()) is not None:
        return checker.given(known.operands), known
    if kind == "composed":
        return checker.composed(), None
    if kept is None and kind == "fresh":
        return checker.first(), None
    # the numbers of exact probes are of no use to other calls
    if kept is None or kind in ("fresh", "exact") or checker.problem.sparsity is not None:
        return checker.fresh(), None
    if kind == "alike":
        return alike(kept, rng.getrandbits(60)) or checker.fresh(), None
    if kind == "one":
        return one_changed(kept, rng) or checker.fresh(), None
    if kind == "near":
        return nearby(kept, checker.turns.next(NEARBY)) or one_changed(kept, rng) or checker.fresh(), None
    if kind == "related":
        return related(kept, checker.turns.next(RELATIONS), rng) or checker.fresh(), None
    if kind in ("left", "right"):  # a, or b and what is added, stays, alpha and beta do not
        new = checker.plain()
        return (dataclasses.replace(new, b=kept.b, inp=kept.inp) if kind == "left" else dataclasses.replace(new, a=kept.a)), None
    return kept, None
