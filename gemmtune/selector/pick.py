"""The pick: the fastest correct choice. Ties follow a fixed order, so that every run picks the same choice."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ..backends.table import BACKENDS, TEMPLATES
from ..choice import Status
from ..timing.rounds import TIE, tie
from .result import Outcome

LAUNCH_BOUND_US = 10.0
"""Times in µs below which kernels wait for the host. A library call costs the host about twice as much work as a kernel of our own
templates, so among equals ours come first. Times of whole calls include this work already."""

KERNEL_TIE = 0.01
"""Tolerance for ties between GPU kernels: 1% of the fastest. Torch's own operation and whole calls on a CPU are tied within TIE.
Kernels that were 2% slower here were up to 4% slower inside a model."""

NEAR = 1.25
"""Factor of the best time within which choices enter the final rounds, after the short measurement on a GPU. Short windows are off
by less than 25%."""

OF_ONE_KERNEL = 3
"""Maximum number of entrants that share one compiled kernel and differ only in launch arguments."""


def right(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes that were verified and measured, the fastest first."""
    return sorted((o for o in outcomes if o.status is Status.OK and o.time_us is not None), key=_time)


def pick(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the choice to run: among all ties with the fastest, the first in a fixed order.

    Backends follow the order of their table, library calls first. Within a backend, offers keep their order, the
    best by its model first. Times of the final rounds compare only with each other. If there were final rounds, all other choices
    are excluded. Times of a busy machine are tied with that of torch's operation within a larger margin (``tie``).
    """
    candidates = right(outcomes)
    if any(o.finalist for o in candidates):
        candidates = [o for o in candidates if o.finalist]
    if not candidates:
        return None
    best = candidates[0]

    def margin(o: Outcome) -> float:
        if o.baseline:
            return tie(o.disturbed or best.disturbed)
        return TIE if best.host_us else KERNEL_TIE

    tied = [o for o in candidates if _time(o) <= (1 + margin(o)) * _time(best)]
    launch_bound = _time(best) < LAUNCH_BOUND_US and not best.host_us and not any(o.disturbed for o in tied)
    ours = [o for o in tied if o.backend in TEMPLATES] if launch_bound else []
    order = {name: number for number, name in enumerate(BACKENDS)}  # backends of other packages come last
    return min(ours or tied, key=lambda o: (order.get(o.backend, len(order)), o.place, o.name))


def shortlist(
    outcomes: Iterable[Outcome], most: int, kernel_of: Callable[[Outcome], str | None] = lambda _: None, *, near: float = NEAR
) -> list[Outcome]:
    """Return the choices for the final rounds: the fastest ``most`` within the factor ``near``, and torch's operation at any time.

    ``kernel_of`` returns the compiled kernel of a choice, or None if it shares none. At most OF_ONE_KERNEL choices share a kernel.
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
