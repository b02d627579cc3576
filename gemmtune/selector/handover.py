"""Which choice serves which Ms: by the times at the anchors, and by bisecting where one hands over to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from ..timing.rounds import TIE

Times = Mapping[int, Mapping[str, float]]
"""Microseconds by M, then by the name of a choice: those that compare with each other at that M."""
Measure = Callable[[int, tuple[str, str]], Mapping[str, float]]
"""``measure(m, names)``: times that compare of choices at another M; those that are not legal or not right there are left out."""

MOST_LOSS = 0.03
"""What a hand-over at the wrong M may cost: it is looked for more closely while it costs more."""
SLOWER_THAN_TORCH = 2.0
"""A loss against torch's own operation counts so many times more: a library's algorithm that is the best at one M loses at others,
where torch takes another one."""
SWITCH = 0.02
"""Another choice for an anchor has to gain as much: less is a tie, and each segment is a kernel to load."""
MOST_SEGMENTS = 16
BETWEEN: Sequence[tuple[int, Sequence[float]]] = (
    (2048, (1.04, 1.25, 1.54, 1.75)),
    (64, (1.04, 1.14, 1.25, 1.32, 1.5, 1.56, 1.75, 1.88)),
    (16, (1.25, 1.5, 1.75)),
    (8, (1.4,)),
    (2, (1.5,)),
)
"""The anchors between a power of two and the next one, as multiples of the power, by the least power for which they hold.

The last tile of 64, 128 or 256 rows is full at some of them and has a few rows at others, just above a multiple of it."""
LAST_TUNED, LEAST_LAST = 4, 64
"""The most rows by those of the last anchor at which everything competes, unless that has fewer rows than so many."""
NARROW_ROWS = (16,)
"""Where weights of 4 and 8 bits change kernels from those of the fewest rows to others: tuned for 8 and 64 rows alone, neither side
compiles those between."""
FINEST = 32
"""A hand-over between two Ms that differ by less than that part of the smaller, with no multiple of STEP in between, is not looked
for more closely."""
STEP = 64
"""Rows of a tile, or a part of them: with one row more than a multiple a choice needs a further row of tiles, and is slower by it.
So that is where it hands over to another one that has not begun a row there."""


def assigned(times: Times, baseline: str = "") -> dict[int, str]:
    """The choice of each anchor: the least sum of relative losses, of which every change between neighbours is one.

    Losses against ``baseline``, torch's own, count more, and it is tied with what is faster by TIE.
    """
    penalty = SWITCH
    while True:
        names = _cheapest(times, penalty, baseline)
        if sum(x != y for x, y in pairwise(names.values())) < MOST_SEGMENTS:
            return names
        penalty *= 2


def _cheapest(times: Times, penalty: float, baseline: str) -> dict[int, str]:
    """The sequence of least cost, found from the first anchor to the last (Viterbi's algorithm)."""
    anchors = sorted(times)
    costs: dict[str, float] = {}
    came_from: list[dict[str, str]] = []
    for m in anchors:
        best_us = min(times[m].values())
        losses = {name: math.log(time_us / best_us) for name, time_us in times[m].items()}
        if baseline in losses:
            of_torch = losses[baseline]
            losses = {name: loss + SLOWER_THAN_TORCH * max(0.0, loss - of_torch) for name, loss in losses.items()}
            losses[baseline] = max(0.0, of_torch - TIE)
        if not came_from:
            costs, back = losses, {}
        else:
            cheapest = min(costs, key=costs.__getitem__)
            back = {name: name if costs.get(name, math.inf) <= costs[cheapest] + penalty else cheapest for name in losses}
            costs = {name: loss + costs[back[name]] + penalty * (back[name] != name) for name, loss in losses.items()}
        came_from.append(back)
    last = min(costs, key=costs.__getitem__)
    found = [last]
    for back in reversed(came_from[1:]):
        found.append(back[found[-1]])
    return dict(zip(anchors, reversed(found), strict=True))


def hand_over(
    lower: int,
    upper: int,
    names: tuple[str, str],
    times: dict[int, dict[str, float]],
    measure: Measure,
    apart: int = 1,
    baseline: str = "",
) -> int:
    """The first M of the second choice, above ``lower`` and at most ``upper``, the anchors of the two.

    ``times`` is filled with what is measured, at Ms that are a multiple of ``apart`` above ``lower``. If one of the two is
    ``baseline``, torch's own, it is tied with the other by TIE.
    """
    first, second = names
    lean = TIE * ((second == baseline) - (first == baseline))
    for m in (lower, upper):
        complete(m, names, times, measure)
    while True:
        kept, taken = _loss(times[upper], first, second) + lean, _loss(times[lower], second, first) - lean
        middle = _middle(lower, upper, apart)
        if min(kept, taken) <= MOST_LOSS or middle is None:
            return upper if kept <= taken else lower + 1
        complete(middle, names, times, measure)
        if _loss(times[middle], first, second) + lean <= 0:
            lower = middle
        else:
            upper = middle


def _middle(lower: int, upper: int, apart: int) -> int | None:
    """The M of a class ``apart`` that is asked between two others, just above a multiple of STEP if it can be; None where they are
    near enough."""
    halfway = (lower + upper) / 2
    steps = range(lower // STEP * STEP + 1, upper, STEP)
    above = (lower + -(-(m - lower) // apart) * apart for m in steps if m > lower)
    near_steps = [m for m in above if m < upper]
    if near_steps:
        return min(near_steps, key=lambda m: abs(m - halfway))
    return lower + (upper - lower) // (2 * apart) * apart if upper - lower > max(apart, lower // FINEST) else None


def complete(m: int, names: tuple[str, str], times: dict[int, dict[str, float]], measure: Measure) -> None:
    """Measure both at an M unless they are known there, and note their times beside those that are."""
    known = times.get(m, {})
    if not all(name in known for name in names):
        # Times of different sessions do not compare.
        times[m] = {**known, **measure(m, names)} if not known else _scaled(known, measure(m, names))


def _scaled(known: Mapping[str, float], fresh: Mapping[str, float]) -> dict[str, float]:
    """The known times, and those of a later session as they would have been beside these."""
    shared = [math.log(known[name] / fresh[name]) for name in fresh if name in known]
    factor = math.exp(sum(shared) / len(shared)) if shared else 1.0
    return {**{name: time_us * factor for name, time_us in fresh.items()}, **known}


def _loss(times: Mapping[str, float], taken: str, instead_of: str) -> float:
    """What it costs to take the one instead of the other, as a share; infinite where it is not legal, -1 where the other is not."""
    return times.get(taken, math.inf) / times.get(instead_of, math.inf) - 1


def anchors_of(rows: range, has: Callable[[int], bool], recorded: Sequence[int] = ()) -> list[int]:
    """The Ms that are measured: powers of two, those BETWEEN them, both ends, and those that were ``recorded``.

    Where the class ``has`` only some Ms, the next one that it has stands for each.
    """
    powers = (2**i for i in range(rows[-1].bit_length()))
    likely = (*recorded, *(m for power in powers for m in (power, *_between(power))))
    wanted = {rows[0], rows[-1], *(m for m in likely if m in rows)}
    members = [next((m for m in range(x, rows[-1] + 1) if has(m)), None) for x in sorted(wanted)]
    return sorted({m for m in members if m is not None})


def _between(power: int) -> list[int]:
    """The anchors between a power of two and the next one."""
    factors = next((factors for least, factors in BETWEEN if power >= least), ())
    return [round(power * factor) for factor in factors]


def spread(anchors: Sequence[int], apart: float, narrow: bool = False) -> list[int]:
    """The anchors at which everything competes: both ends, and between them powers of two by about the factor ``apart``.

    The last one is LAST_TUNED times smaller than the end: what is good where a GPU is busy competes where it is busier. A
    ``narrow`` weight, which is widened, is tuned at NARROW_ROWS too.
    """
    if apart > 1:
        anchors = [m for m in anchors if m <= max(anchors[-1] // LAST_TUNED, LEAST_LAST)] or anchors
    first, last = anchors[0], anchors[-1]
    inner = [m for m in anchors if m.bit_count() == 1] or list(anchors)
    count = math.ceil(math.log(last / first) / math.log(apart)) if apart > 1 else len(anchors)
    if count >= len(anchors):
        return list(anchors)
    wanted = (math.log(first) + math.log(last / first) * i / count for i in range(1, count))
    too = [m for m in NARROW_ROWS if narrow and m in anchors]
    return sorted({first, last, *too, *(min(inner, key=lambda m: abs(math.log(m) - middle)) for middle in wanted)})
