"""Assignment of choices to ranges of M: by their times at sampled Ms, and by bisection of the crossovers between them."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from ..timing.rounds import TIE

Times = Mapping[int, Mapping[str, float]]
"""Times in µs by M, then by the name of a choice. Times at one M are comparable."""
Measure = Callable[[int, tuple[str, str]], Mapping[str, float]]
"""``measure(m, names)``: comparable times of choices at another M. Choices that are illegal or wrong there are missing."""

MOST_LOSS = 0.03
"""Tolerated loss from a misplaced crossover. Bisection continues while the loss is larger."""
SLOWER_THAN_TORCH = 2.0
"""Additional weight of a loss against torch's own operation. A library's algorithm that is the best at one M loses at others, where
torch takes another one."""
SWITCH = 0.02
"""Gain that justifies another choice at a sampled M. Less is a tie, and each segment is another kernel to load."""
MOST_SEGMENTS = 16
BETWEEN: Sequence[tuple[int, Sequence[float]]] = (
    (2048, (1.04, 1.25, 1.54, 1.75)),
    (64, (1.04, 1.14, 1.25, 1.32, 1.5, 1.56, 1.75, 1.88)),
    (16, (1.25, 1.5, 1.75)),
    (8, (1.4,)),
    (2, (1.5,)),
)
"""Sampled Ms between a power of two and the next one, as multiples of that power. The first entry whose bound is not above the
power applies.

At some of these Ms the last tile of 64, 128 or 256 rows is full. At others, just above a multiple of the tile, it has a few
rows."""
LAST_TUNED, LEAST_LAST = 4, 64
"""Limits on the last sampled M at which all choices compete: the largest M divided by LAST_TUNED, or LEAST_LAST if that is more."""
NARROW_ROWS = (16,)
"""Additional tuned Ms for weights of 4 and 8 bits, which change kernels there. If only 8 and 64 rows are tuned, neither side
compiles the kernels for the Ms between them."""
FINEST = 32
"""Resolution of the bisection: it stops at an interval of at most 1/FINEST of the smaller M, unless an M just above a multiple of
STEP lies inside."""
STEP = 64
"""Rows of a tile, or a divisor of them. One row above a multiple, a choice needs a further row of tiles and gets slower. Crossovers
lie there, to a choice that does not begin a row of tiles at that M."""


def assigned(times: Times, baseline: str = "", margin: float = TIE) -> dict[int, str]:
    """Return the choice for each sampled M that minimizes the sum of relative losses plus a penalty for each change of choice.

    Losses against ``baseline``, torch's own operation, count more. Torch's operation also wins ties within ``margin``.
    """
    penalty = SWITCH
    while True:
        names = _cheapest(times, penalty, baseline, margin)
        if sum(x != y for x, y in pairwise(names.values())) < MOST_SEGMENTS:
            return names
        penalty *= 2


def _cheapest(times: Times, penalty: float, baseline: str, margin: float) -> dict[int, str]:
    """Return the sequence of least cost, computed from the first sampled M to the last (Viterbi's algorithm)."""
    sampled = sorted(times)
    costs: dict[str, float] = {}
    came_from: list[dict[str, str]] = []
    # Forward: the least cost of each choice at each M, and the choice before it.
    for m in sampled:
        best_us = min(times[m].values())
        losses = {name: math.log(time_us / best_us) for name, time_us in times[m].items()}
        if baseline in losses:
            of_torch = losses[baseline]
            # A gain within the margin of a busy machine may be none.
            doubts = {name: max(0.0, min(margin - TIE, margin - of_torch + loss)) for name, loss in losses.items()}
            losses = {name: loss + doubts[name] + SLOWER_THAN_TORCH * max(0.0, loss - of_torch) for name, loss in losses.items()}
            losses[baseline] = max(0.0, of_torch - margin)
        if not came_from:
            costs, back = losses, {}
        else:
            cheapest = min(costs, key=costs.__getitem__)
            back = {name: name if costs.get(name, math.inf) <= costs[cheapest] + penalty else cheapest for name in losses}
            costs = {name: loss + costs[back[name]] + penalty * (back[name] != name) for name, loss in losses.items()}
        came_from.append(back)
    # Backward: follow the cheapest sequence.
    last = min(costs, key=costs.__getitem__)
    found = [last]
    for back in reversed(came_from[1:]):
        found.append(back[found[-1]])
    return dict(zip(sampled, reversed(found), strict=True))


def find_crossover(
    lower: int,
    upper: int,
    names: tuple[str, str],
    times: dict[int, dict[str, float]],
    measure: Measure,
    apart: int = 1,
    baseline: str = "",
    margin: float = TIE,
) -> int:
    """Return the first M of the second choice, above ``lower`` and at most ``upper``, the sampled Ms of the two choices.

    Measurements at multiples of ``apart`` above ``lower`` are added to ``times``. Torch's ``baseline`` wins ties within ``margin``.
    """
    first, second = names
    lean = margin * ((second == baseline) - (first == baseline))
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
    """Return the M to measure between two others, a multiple of ``apart`` above ``lower``; None if they are close enough."""
    halfway = (lower + upper) / 2
    steps = range(lower // STEP * STEP + 1, upper, STEP)
    above = (lower + -(-(m - lower) // apart) * apart for m in steps if m > lower)
    near_steps = [m for m in above if m < upper]
    if near_steps:
        return min(near_steps, key=lambda m: abs(m - halfway))
    return lower + (upper - lower) // (2 * apart) * apart if upper - lower > max(apart, lower // FINEST) else None


def complete(m: int, names: tuple[str, str], times: dict[int, dict[str, float]], measure: Measure) -> None:
    """Measure both choices at an M unless their times are known, and add them to the times known there."""
    known = times.get(m, {})
    if not all(name in known for name in names):
        # Times of different sessions do not compare, so new ones are scaled to the known ones.
        times[m] = {**known, **measure(m, names)} if not known else _scaled(known, measure(m, names))


def _scaled(known: Mapping[str, float], fresh: Mapping[str, float]) -> dict[str, float]:
    """Return the known times, and fresh ones scaled by the choices that both sessions measured."""
    shared = [math.log(known[name] / fresh[name]) for name in fresh if name in known]
    factor = math.exp(sum(shared) / len(shared)) if shared else 1.0
    return {**{name: time_us * factor for name, time_us in fresh.items()}, **known}


def _loss(times: Mapping[str, float], taken: str, instead_of: str) -> float:
    """Return the relative cost of one choice compared with another; infinite if it is illegal, -1 if only the other is."""
    return times.get(taken, math.inf) / times.get(instead_of, math.inf) - 1


def sampled_rows(rows: range, has: Callable[[int], bool], recorded: Sequence[int] = ()) -> list[int]:
    """Return the Ms to measure: powers of two, those BETWEEN them, both ends, ``recorded`` ones, or the class's next ones."""
    powers = (2**i for i in range(rows[-1].bit_length()))
    likely = (*recorded, *(m for power in powers for m in (power, *_between(power))))
    wanted = {rows[0], rows[-1], *(m for m in likely if m in rows)}
    members = [next((m for m in range(x, rows[-1] + 1) if has(m)), None) for x in sorted(wanted)]
    return sorted({m for m in members if m is not None})


def _between(power: int) -> list[int]:
    """Return the sampled Ms between a power of two and the next one."""
    factors = next((factors for least, factors in BETWEEN if power >= least), ())
    return [round(power * factor) for factor in factors]


def spread(sampled: Sequence[int], apart: float, narrow: bool = False) -> list[int]:
    """Return the sampled Ms at which all choices compete: both ends, and powers of two between them by about the factor ``apart``.

    The last one is LAST_TUNED times smaller than the end: a choice that is good on a busy GPU competes where the GPU is busier. A
    ``narrow`` weight, which a kernel widens, is also tuned at NARROW_ROWS.
    """
    if apart > 1:
        sampled = [m for m in sampled if m <= max(sampled[-1] // LAST_TUNED, LEAST_LAST)] or sampled
    first, last = sampled[0], sampled[-1]
    inner = [m for m in sampled if m.bit_count() == 1] or list(sampled)
    count = math.ceil(math.log(last / first) / math.log(apart)) if apart > 1 else len(sampled)
    if count >= len(sampled):
        return list(sampled)
    wanted = (math.log(first) + math.log(last / first) * i / count for i in range(1, count))
    too = [m for m in NARROW_ROWS if narrow and m in sampled]
    return sorted({first, last, *too, *(min(inner, key=lambda m: abs(math.log(m) - middle)) for middle in wanted)})
