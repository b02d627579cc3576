"""Final rounds, which rank the fastest choices against each other."""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .contenders import Contender
from .timer import median_margin

TIE = 0.02
"""Largest distance to the fastest that counts as a tie: process, memory and previous kernel shift times by 2%."""
SURE = 1.3
"""Factor on the 95% interval. With many contenders and a check after every other round, one in twenty would often be wrong."""
DISTURBED = 1.25
"""Ratio to a contender's shortest sample above which a sample was disturbed: clocks change by less."""
BUSY_MARK = "on a busy machine"
"""Words that stand beside every time and ratio of a disturbed measurement."""
LEAST_ROUNDS = 4
"""Least number of rounds, even so that each contender runs early and late equally often. With fewer the spread is unknown."""
MORE_IF_SLOW = 3.0
"""Multiple of the budget by which rounds may exceed it until there are LEAST_ROUNDS."""
LEAST_ROUNDS_TO_SETTLE = 10
"""Least number of rounds before the ranking may settle: the spread of a handful of samples is too often small by chance."""


def tie(disturbed: object = "") -> float:
    """Return the largest gain that does not justify leaving torch: TIE, or DISTURBED - 1, as samples of busy machines err."""
    return DISTURBED - 1 if disturbed else TIE


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """Median time of a call, and half the 95% interval of its comparison with the fastest (of its median for the fastest)."""

    time_us: float
    margin_us: float
    spread: float = 0.0
    """Spread of its samples, as a share of their median."""


Failed = Callable[[str, Exception], None]
"""Callback for the exception that a contender raised in a round. The contender then drops out."""


def raise_again(name: str, error: Exception) -> None:  # noqa: ARG001 - as Failed has it
    """Let an error of one contender end the rounds."""
    raise error


def play(
    contenders: Mapping[str, Contender],
    *,
    budget_s: float,
    warm_up_s: float = 0.0,
    keep: Collection[str] = (),
    failed: Failed = raise_again,
    host_us: float = 0.0,
) -> dict[str, Ranked]:
    """Play rounds that sample each contender once, in an order that is reversed each time.

    The fastest by plain median is the reference. Another contender is judged by its ratios to the reference in the same round,
    in which drifting clocks cancel: by the median of their logarithms. It has *lost* if the whole interval of that median lies
    beyond TIE, and is *tied* if it lies within. Disturbed samples do not count, and ``host_us`` of each is no kernel's time.

    A contender that has lost takes no part in further rounds unless it is named in ``keep``. The rounds end when every other
    contender is tied, or when the budget is spent.
    """
    # Warm up to sustained clocks.
    contenders = dict(contenders)
    begun = time.perf_counter()
    while contenders and time.perf_counter() - begun < warm_up_s:
        _round(contenders, list(contenders), failed)
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    playing = list(contenders)
    deadline = time.perf_counter() + budget_s
    count = 0
    while playing:
        for name, time_us in _round(contenders, playing if count % 2 == 0 else playing[::-1], failed).items():
            rounds[name].append(time_us)
        rounds = {name: times for name, times in rounds.items() if name in contenders}
        playing = [name for name in playing if name in contenders]
        count += 1
        if count % 2 or not playing:
            continue
        # After every even round: stop, or drop losers.
        late_s = time.perf_counter() - deadline
        if late_s >= 0 and (count >= LEAST_ROUNDS or late_s >= MORE_IF_SLOW * budget_s):
            break
        if count >= LEAST_ROUNDS:
            ratios = _ratios(rounds)
            playing = [name for name in playing if name in keep or not ratios[name].lost]
            if count >= LEAST_ROUNDS_TO_SETTLE and all(ratio.lost or ratio.tied for ratio in ratios.values()):
                break
    return _ranked(rounds, host_us) if rounds else {}


def spread_of(samples: Sequence[float]) -> float:
    """Return 1.4826 · the median absolute deviation (the sd of a normal law) as a share of the samples' median."""
    middle = statistics.median(samples)
    return 1.4826 * statistics.median(abs(s - middle) for s in samples) / middle if middle else 0.0


@dataclass(frozen=True, slots=True)
class _Ratio:
    """Logarithm of a contender's time over the reference's, and half its 95% interval."""

    middle: float
    half: float

    @property
    def lost(self) -> bool:
        return self.middle - SURE * self.half > math.log1p(TIE)

    @property
    def tied(self) -> bool:
        return self.middle + SURE * self.half <= math.log1p(TIE)


def _round(contenders: dict[str, Contender], order: list[str], failed: Failed) -> dict[str, float]:
    """Sample each contender once. All begin before the first result is read, because an idle GPU changes its clocks."""
    for name in order:
        with _surviving(contenders, name, failed):
            contenders[name].begin()
    times_us: dict[str, float] = {}
    for name in order:
        if name in contenders:
            with _surviving(contenders, name, failed):
                times_us[name] = contenders[name].result_us()
    return times_us


@contextlib.contextmanager
def _surviving(contenders: dict[str, Contender], name: str, failed: Failed) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises is reported
        del contenders[name]
        failed(name, error)


def _undisturbed(times: Sequence[float]) -> list[bool]:
    """Mark the undisturbed samples: a much longer one than the shortest had to wait for another process."""
    return [t <= DISTURBED * min(times) for t in times]


def _reference(rounds: Mapping[str, list[float]]) -> str:
    """Return the fastest contender that took part in every round."""
    count = max(map(len, rounds.values()))
    full = {name: times for name, times in rounds.items() if len(times) == count}
    return min(full, key=lambda name: statistics.median(itertools.compress(full[name], _undisturbed(full[name]))))


def _ratios(rounds: Mapping[str, list[float]]) -> dict[str, _Ratio]:
    """Return each contender's ratio to the reference in its own rounds, the first ones if it dropped out."""
    reference = rounds[_reference(rounds)]
    return {name: _ratio(times, reference[: len(times)]) for name, times in rounds.items()}


def _ratio(times: Sequence[float], reference: Sequence[float]) -> _Ratio:
    """Return the ratio in undisturbed rounds or, if too few, of the shortest times with an infinite margin."""
    both = [mine and theirs for mine, theirs in zip(_undisturbed(times), _undisturbed(reference), strict=True)]
    logs = [math.log(t / r) for t, r in itertools.compress(zip(times, reference, strict=True), both)]
    if len(logs) < min(LEAST_ROUNDS, len(times)):
        return _Ratio(math.log(min(times) / min(reference)), math.inf)
    return _Ratio(*median_margin(logs))


def _ranked(rounds: Mapping[str, list[float]], host_us: float) -> dict[str, Ranked]:
    reference = _reference(rounds)
    fastest_us, margin_us = median_margin([*itertools.compress(rounds[reference], _undisturbed(rounds[reference]))])
    ratios = _ratios(rounds)
    ranked: dict[str, Ranked] = {}
    for name, times in rounds.items():
        # The reference may have waited in the rounds of a contender that dropped out. Clocks alone change less than that.
        least_us = host_us + (min(times) - host_us) / DISTURBED
        time_us = max(fastest_us * math.exp(ratios[name].middle), least_us)
        half_us = margin_us if name == reference else time_us * min(ratios[name].half, 1.0)
        ranked[name] = Ranked(time_us=time_us, margin_us=half_us, spread=spread_of(times))
    return ranked
