"""Reduction classes of a range in progress, ranked by what they lose to the best choices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..choice import Choice, Status
from ..numerics.reduction import Reduction
from .crossover import Times
from .range_work import Work
from .remote import open_session

MOST_RANKED = 4
"""Number of classes that compete at the sampled Ms."""
MOST_OVER_TORCH = 1.08
"""Slowdown against torch's own operation at one M. A class without such an M is preferred."""
MISSING, DIVIDED = 1.0, 0.15
"""Losses at an M where a class has no measured choice: a slowdown of e. Parts in rising order can be had of other choices."""
MOST_FLOPS: int = 2**36
"""Operations of the product on a CPU, about a second, whose rows the bits of others are compared with."""


def class_of(choice: Choice | None) -> Reduction | None:
    """Return the class that a choice declares. One that only promises batch invariance has a class of its own. None: nothing."""
    if choice is None or not choice.batch_invariant:
        return None
    return choice.claims.reduction or Reduction.alone(choice.name)


def members_of(work: Work, reduction: Reduction) -> list[str]:
    """Return the names of the choices of a class that are not known to be wrong."""
    return [name for name, choice in work.choices.items() if name not in work.wrong and class_of(choice) == reduction]


def classes_of(work: Work) -> list[Reduction]:
    """Return the declared classes of all choices."""
    return list(dict.fromkeys(x for choice in work.choices.values() if (x := class_of(choice)) is not None))


def missing_loss(reduction: Reduction) -> float:
    """Return the loss of a class at an M where none of its choices is measured yet."""
    return DIVIDED if reduction.parts and not reduction.order else MISSING


def ranked(work: Work) -> list[Reduction]:
    """Return the declared classes by their mean loss, those that lose too much to torch at some M last.

    The likeliest are ranked with the choices that declare nothing, at the sampled Ms where these have the bits of the class.
    """
    by_mean = sorted(classes_of(work), key=lambda x: (mean_loss(work.times, set(members_of(work, x))), str(x)))
    best = {x: _best_us(work, x) for x in by_mean[:MOST_RANKED]}
    means = {x: sum(_losses(work.times, own)) for x, own in best.items()}
    worst = {x: max(_losses(work.times, own, work.baseline), default=0.0) for x, own in best.items()}
    likely = sorted(best, key=lambda x: (worst[x] > math.log(MOST_OVER_TORCH), means[x], str(x)))
    return [*likely, *by_mean[MOST_RANKED:]]


def _best_us(work: Work, reduction: Reduction) -> dict[int, float]:
    """Return the least time of a class at each sampled M, with a faster choice that declares nothing where its bits are equal."""
    members = members_of(work, reduction)
    found = _least(work.times, set(members))
    reference = reference_of(work, members)
    whole = work.at(reference, top_row(work)) if reference is not None else None
    if not isinstance(whole, Choice):
        return found
    with open_session(whole.problem, work.device, work.settings) as session:
        for m, here in work.times.items():
            faster = [x for x, us in here.items() if us < found.get(m, math.inf) and class_of(work.choices[x]) is None]
            for name in sorted(faster, key=here.__getitem__) if m <= whole.problem.m else ():
                at = work.at(name, m)
                if isinstance(at, Choice) and session.same_rows(whole, [at]).status is Status.OK:
                    found[m] = here[name]
                    break
    return found


def _least(times: Times, members: set[str]) -> dict[int, float]:
    """Return the least time of some choices at each M where one was measured."""
    own = {m: [us for name, us in here.items() if name in members and us > 0] for m, here in times.items()}
    return {m: min(us) for m, us in own.items() if us}


def mean_loss(times: Times, members: set[str], missing: float = MISSING) -> float:
    """Return the mean logarithm of the slowdown of some choices against the best."""
    losses = _losses(times, _least(times, members), missing=missing)
    return sum(losses) / max(len(losses), 1)


def _losses(times: Times, own: Mapping[int, float], against: str = "", missing: float = MISSING) -> list[float]:
    """Return the logarithm of the slowdown of the ``own`` times at each M, against the best or where it was measured one choice."""
    losses = []
    for m, here in times.items():
        best = here.get(against, 0.0) if against else min((us for us in here.values() if us > 0), default=0.0)
        losses.append(missing if m not in own else math.log(own[m] / best) if best > 0 else 0.0)
    return losses


def top_row(work: Work) -> int:
    """Return the largest M whose rows are compared: the end of the range, on a CPU less if the product takes long."""
    rows = work.rows_class.within(work.rows)
    if work.device.type != "cpu":
        return rows[-1]
    most: int = max(MOST_FLOPS // max(work.rows_class.at(rows[0]).flops // rows[0], 1), rows[0])
    tried = [rows[0], *rows[:: max(len(rows) // 64, 1)], rows[-1]]
    found: int = max(m for m in tried if m <= most)
    return found


def reference_of(work: Work, members: Sequence[str]) -> str | None:
    """Return the choice with whose bits others are compared: one that serves both ends of the range, or else the end."""
    ends = work.rows_class.within(work.rows)[0], top_row(work)
    legal = [name for name in members if isinstance(work.at(name, ends[1]), Choice)]
    both = (name for name in legal if isinstance(work.at(name, ends[0]), Choice))
    return next(both, next(iter(legal), None))
