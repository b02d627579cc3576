"""The pick: the fastest right choice, with ties broken by a fixed order so that every run picks the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ..backends.table import BACKENDS, TEMPLATES
from ..choice import Status
from ..timing.rounds import TIE
from .result import Outcome

LAUNCH_BOUND_US = 10.0
"""Kernels shorter than this wait for the host, whose work for a library call is about twice that for a kernel of our own templates:
there, among equals, ours come first. Times of whole calls have that in them."""

KERNEL_TIE = 0.01
"""Kernels of a GPU within 1% of the fastest are tied, torch's own operation within TIE, as are whole calls on a CPU. Kernels that
were 2% slower here were seen up to 4% behind where a model used them."""

NEAR = 1.25
"""Choices whose first, short measurement on a GPU is within 25% of the best go to the final rounds: short windows misjudge by
less."""

OF_ONE_KERNEL = 3
"""Entrants that are one compiled kernel with other arguments of its launch."""


def right(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those that were verified and measured, the fastest first."""
    return sorted((o for o in outcomes if o.status is Status.OK and o.time_us is not None), key=_time)


def pick(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The choice to run: of all that are tied with the fastest, the first in a fixed order.

    The order is that of the table of backends, library calls first; within a backend that of the offers, first what its model likes
    best. Times of the final rounds only compare with each other: when there were final rounds the others are out of the question.
    """
    candidates = right(outcomes)
    if any(o.finalist for o in candidates):
        candidates = [o for o in candidates if o.finalist]
    if not candidates:
        return None
    best = candidates[0]
    tied = [o for o in candidates if _time(o) <= (1 + (TIE if o.baseline or best.host_us else KERNEL_TIE)) * _time(best)]
    ours = [o for o in tied if o.backend in TEMPLATES] if _time(best) < LAUNCH_BOUND_US and not best.host_us else []
    order = {name: number for number, name in enumerate(BACKENDS)}  # backends of other packages come last
    return min(ours or tied, key=lambda o: (order.get(o.backend, len(order)), o.place, o.name))


def shortlist(
    outcomes: Iterable[Outcome], most: int, kernel_of: Callable[[Outcome], str | None] = lambda _: None, *, near: float = NEAR
) -> list[Outcome]:
    """Who goes to the final rounds: the fastest ``most`` within the factor ``near``, and torch's own operation whatever its time.

    ``kernel_of`` tells which of them are one compiled kernel (None: a kernel of its own); of those OF_ONE_KERNEL go.
    """
    candidates = right(outcomes)
    if not candidates:
        return []
    listed: list[Outcome] = []
    count: Counter[str] = Counter()
    for o in candidates:
        kernel = kernel_of(o)
        if _time(o) <= near * _time(candidates[0]) and len(listed) < most and (kernel is None or count[kernel] < OF_ONE_KERNEL):
            listed.append(o)
            count[kernel or o.name] += 1
    return listed + [o for o in candidates if o.baseline and o not in listed]


def _time(outcome: Outcome) -> float:
    assert outcome.time_us is not None
    return outcome.time_us
