"""The pick: the fastest right choice, with ties broken by a fixed order so that every run picks the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ..backends.table import BACKENDS, TEMPLATES
from ..choice import Status
from .result import Outcome

__all__ = ["TIE", "pick", "shortlist"]

TIE = 0.01
"""Choices within 1% of the fastest are tied: repeated measurements of one choice differ by as much."""

WORTH_LEAVING_TORCH = 0.02
"""torch's own operation stays the pick unless something is faster by more than 2%: on one GPU, in one process, what ran just before
shifts two kernels against each other by as much, and nobody should be worse off than before."""

LAUNCH_BOUND_US = 10.0
"""Kernels shorter than this wait for the host, whose work for a library call is about twice that for a kernel of our own templates:
there, among equals, ours come first."""

NEAR = 1.25
"""Choices whose first, short measurement is within 25% of the best go to the final rounds: short windows misjudge by less."""

OF_ONE_KERNEL = 3
"""Entrants that are one compiled kernel with other arguments of its launch."""


def right(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those that were verified and measured, the fastest first."""
    return sorted((o for o in outcomes if o.status is Status.OK and o.time_us is not None), key=_time)


def pick(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The choice to run: of all within TIE (or the measured margin) of the fastest, the first by backend and then by name.

    torch's own operation counts as tied up to WORTH_LEAVING_TORCH. Times of the final rounds only compare with each other, so when
    there were final rounds the others are out of the question.
    """
    candidates = right(outcomes)
    if any(o.finalist for o in candidates):
        candidates = [o for o in candidates if o.finalist]
    if not candidates:
        return None
    best = candidates[0]
    tied = [o for o in candidates if _time(o) <= _time(best) + _slack(o, best)]
    ours = [o for o in tied if o.backend in TEMPLATES] if _time(best) < LAUNCH_BOUND_US else []
    return min(ours or tied, key=_order)


def shortlist(outcomes: Iterable[Outcome], most: int, kernel_of: Callable[[Outcome], str | None] = lambda _: None) -> list[Outcome]:
    """Who goes to the final rounds: the fastest ``most``, and torch's own operation whatever its time.

    ``kernel_of`` tells which of them are one compiled kernel (None: a kernel of its own); of those OF_ONE_KERNEL go.
    """
    candidates = right(outcomes)
    if not candidates:
        return []
    near: list[Outcome] = []
    count: Counter[str] = Counter()
    for o in candidates:
        kernel = kernel_of(o)
        if _time(o) <= NEAR * _time(candidates[0]) and len(near) < most and (kernel is None or count[kernel] < OF_ONE_KERNEL):
            near.append(o)
            count[kernel or o.name] += 1
    return near + [o for o in candidates if o.baseline and o not in near]


def _time(outcome: Outcome) -> float:
    assert outcome.time_us is not None
    return outcome.time_us


def _slack(outcome: Outcome, best: Outcome) -> float:
    """By how much a choice may be slower than the fastest and still be tied with it, in µs."""
    share = WORTH_LEAVING_TORCH if outcome.baseline else TIE
    return max(share * _time(best), _margin(outcome) + _margin(best))


def _margin(outcome: Outcome) -> float:
    """Half the 95% interval of the median; at most TIE, so that a noisy run cannot make everything equal."""
    return min(float(outcome.info.get("margin_us", 0.0)), TIE * _time(outcome))


def _order(outcome: Outcome) -> tuple[int, str]:
    return (list(BACKENDS).index(outcome.backend), outcome.name)
