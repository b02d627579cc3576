"""The final rounds: rank the fastest choices against each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .timer import Contender, median_margin

__all__ = ["Ranked", "play"]

LOST = 1.05
"""A contender that is surely slower than the fastest by this factor takes no part in further rounds."""
PRECISE = 0.0025
"""Rounds end when every contender near the fastest is known to this share of its time: a quarter of what counts as a tie."""
NEAR = 1.03
"""Contenders within this factor of the fastest must be known precisely, and play to the end."""
LEAST_ROUNDS = 4
"""Even, so that each contender has run early and late in a round equally often; with fewer the spread is unknown."""
LEAST_ROUNDS_IF_SLOW = 2
LEAST_ROUNDS_TO_SETTLE = 10
"""The spread of a handful of samples is small by chance too often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The median time of a call, and half the 95% interval of its comparison with the fastest (for the fastest: of its median)."""

    time_us: float
    margin_us: float


def play(
    contenders: Mapping[str, Contender],
    *,
    budget_s: float,
    finalists: int = 8,
    warm_up_s: float = 0.0,
    keep: Collection[str] = (),
) -> dict[str, Ranked]:
    """Rounds in which each contender is sampled once, in an order that is reversed each time.

    The fastest by plain median is the reference. The time of each other is either its own median, or the reference's times the
    median over rounds of its ratio to the reference in the same round, in which drifting clocks cancel: whichever is known more
    closely (and no time outside of those seen: where the reference alone was disturbed, ratios mean nothing).

    After the first rounds those drop out that are surely lost, or neither among the first ``finalists`` nor near the
    fastest, except the ones named in ``keep``; they compare by their ratios, but are never faster than they were seen. Ends when
    the order near the top is settled, or the budget is spent.
    """
    if not contenders:
        return {}
    _warm_up(contenders, warm_up_s)
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    playing = list(contenders)
    deadline = time.perf_counter() + budget_s
    count = 0
    while True:
        for name, time_us in _round(contenders, playing if count % 2 == 0 else playing[::-1]).items():
            rounds[name].append(time_us)
        count += 1
        if count % 2:
            continue
        spent = time.perf_counter() >= deadline
        if spent and count >= LEAST_ROUNDS_IF_SLOW:
            break
        if count >= LEAST_ROUNDS:
            ranked = _evaluate(rounds)
            if count >= LEAST_ROUNDS_TO_SETTLE and _settled(ranked):
                break
            stay = _staying(ranked, playing, finalists)
            playing = [name for name in playing if name in keep or name in stay]
    return _evaluate(rounds)


def _warm_up(contenders: Mapping[str, Contender], seconds: float) -> None:
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        _round(contenders, list(contenders))


def _round(contenders: Mapping[str, Contender], order: list[str]) -> dict[str, float]:
    """All are begun before the first result is waited for: a GPU that idles in between changes its clocks."""
    for name in order:
        contenders[name].begin()
    return {name: contenders[name].result_us() for name in order}


def _evaluate(rounds: Mapping[str, list[float]]) -> dict[str, Ranked]:
    count = max(map(len, rounds.values()))
    medians = {name: statistics.median(times) for name, times in rounds.items() if len(times) == count}
    reference = min(medians, key=lambda name: medians[name])
    ranked: dict[str, Ranked] = {}
    for name, times in rounds.items():
        time_us, margin_us = median_margin(times)
        dropped = len(times) < count
        # Who dropped out has the first rounds only, at the clocks of those: its ratios compare.
        ratio, spread = median_margin([t / r for t, r in zip(times, rounds[reference], strict=False)])
        paired_us, paired_margin_us = ratio * medians[reference], spread * medians[reference]
        closer = paired_margin_us < margin_us and min(times) <= paired_us <= max(times)
        if dropped:
            time_us, margin_us = max(paired_us, min(times)), paired_margin_us
        elif name != reference and closer:
            time_us, margin_us = paired_us, paired_margin_us
        ranked[name] = Ranked(time_us=time_us, margin_us=margin_us)
    return ranked


def _staying(ranked: Mapping[str, Ranked], playing: Collection[str], finalists: int) -> set[str]:
    """Who is not surely lost, and among the first ``finalists`` or near the fastest."""
    best = min(r.time_us for r in ranked.values())
    order = sorted(playing, key=lambda name: ranked[name].time_us)
    return {
        name for place, name in enumerate(order)
        if not _lost(ranked, name) and (place < finalists or ranked[name].time_us <= NEAR * best)
    }  # fmt: skip


def _lost(ranked: Mapping[str, Ranked], name: str) -> bool:
    best = min(r.time_us for r in ranked.values())
    return ranked[name].time_us - ranked[name].margin_us > LOST * best


def _settled(ranked: Mapping[str, Ranked]) -> bool:
    best = min(r.time_us for r in ranked.values())
    near = [r for r in ranked.values() if r.time_us <= NEAR * best]
    return all(r.margin_us <= PRECISE * r.time_us for r in near)
