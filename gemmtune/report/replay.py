"""Searches replayed on stored measurements: which time each would have found after so many choices, without a machine."""

import dataclasses
import json
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..choice import Choice, Status
from ..device import DeviceInfo, preset
from ..effort import EFFORT
from ..errors import UnavailableError
from ..selector.candidates import Candidates, outcome_of
from ..selector.offers import offers_for, untried_variants
from ..selector.pick import right
from ..selector.result import Outcome
from ..selector.trials import trials_for, tried_offers
from ..settings import Search, Settings
from ..store.row import Row
from .known import Known

Order = Literal["tuning", "ranked", "random"]
ORDERS: tuple[Order, ...] = ("tuning", "ranked", "random")
"""The order in which ``tune`` measures, that of the backends with each one's ranking, and random orders."""
LEAST_CHOICES = 8
"""Fewest measured choices of a problem that is replayed."""
RANDOM_ORDERS = 5
"""Number of random orders of each problem."""
UNKNOWN = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One search of one problem: the regret after each measured choice, and the number of choices that the data lack."""

    regrets: tuple[float, ...]
    unknown: int

    def after(self, budget: int) -> float:
        """Return the regret after ``budget`` choices, or at the end of the search."""
        return self.regrets[min(budget, len(self.regrets)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Regrets of one search in one order, over all problems."""

    search: Search
    order: Order
    traces: tuple[Trace, ...]

    @property
    def choices(self) -> float:
        """The median number of choices that the search measures."""
        return statistics.median(len(trace.regrets) for trace in self.traces)

    @property
    def known(self) -> float:
        """Share of the choices of the search that the data have. The regret says little where it is small."""
        measured, unknown = sum(len(trace.regrets) for trace in self.traces), sum(trace.unknown for trace in self.traces)
        return measured / (measured + unknown)

    @property
    def budgets(self) -> list[int]:
        """Powers of two up to the longest search, and that one."""
        longest = max(len(trace.regrets) for trace in self.traces)
        return [*(2**power for power in range((longest - 1).bit_length())), longest]

    def at(self, budget: int) -> list[float]:
        """Return the regrets after ``budget`` choices, the least first."""
        return sorted(trace.after(budget) for trace in self.traces)

    def to_json(self) -> dict[str, Any]:
        """Return plain values: for each budget the median, the 95th percentile and the largest regret."""
        budgets = [{"choices": budget, **summary(self.at(budget))} for budget in self.budgets]
        return {"search": self.search, "order": self.order, "choices": self.choices, "known": self.known, "budgets": budgets}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Curves of searches and orders. ``skipped`` has the number of problems that could not be replayed, by reason."""

    problems: int
    measured: float
    """Median number of measured choices of a problem."""
    curves: tuple[Curve, ...]
    skipped: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        curves = [curve.to_json() for curve in self.curves]
        return {"problems": self.problems, "measured": self.measured, "skipped": dict(self.skipped), "curves": curves}


def summary(regrets: Sequence[float]) -> dict[str, float]:
    """Return the median, the 95th percentile and the largest of ordered regrets."""
    return {"median": statistics.median(regrets), "p95": regrets[math.ceil(len(regrets) * 95 / 100) - 1], "worst": regrets[-1]}


def replay(found: Iterable[Known], searches: Sequence[Search], settings: Settings, orders: Sequence[Order] = ORDERS) -> Replay:
    """Replay each search in each order on every problem that has enough measured choices.

    Enumeration and ranking are today's; a choice has the stored time of its name. Regret is the least time found over the least of
    all stored times of the problem, less one. The stored choices bound what it can say: a search is compared with them alone.
    """
    usable, skipped = [], dict[str, int]()
    for known in found:
        reason = _why_not(known)
        if reason:
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            usable.append(known)
    curves = []
    for search in searches if usable else ():
        wanted = dataclasses.replace(settings, search=search)
        for order in orders:
            numbers = range(RANDOM_ORDERS if order == "random" else 1)
            traces = [_trace(known, wanted, order, number) for known in usable for number in numbers]
            if found_any := tuple(trace for trace in traces if trace.regrets):
                curves.append(Curve(search=search, order=order, traces=found_any))
    measured = statistics.median(len(right(map(outcome_of, known.rows))) for known in usable) if usable else 0
    return Replay(problems=len(usable), measured=measured, curves=tuple(curves), skipped=skipped)


def _why_not(known: Known) -> str:
    """Return why a problem cannot be replayed, or ""."""
    if known.problem is None:
        return "another version wrote the problem"
    if len(right(map(outcome_of, known.rows))) < LEAST_CHOICES:
        return f"fewer than {LEAST_CHOICES} measured choices"
    try:
        device_of(known.fingerprint)
    except (UnavailableError, ValueError) as error:
        return str(error)
    return ""


def device_of(fingerprint: str) -> DeviceInfo:
    """Return the preset of a machine's architecture, with its name and number of multiprocessors or threads.

    Raises UnavailableError if there is no preset of the architecture.
    """
    fields = json.loads(fingerprint)
    like = preset(fields.get("arch", ""))
    sm_count, threads = int(fields.get("sm_count", like.sm_count)), int(fields.get("threads", like.threads))
    return dataclasses.replace(like, name=fields.get("device", ""), sm_count=sm_count, threads=threads)


def asked(known: Known, search: Search, settings: Settings, order: Order) -> tuple[str, ...]:
    """Return the names of the choices that a search in this order measures, whether the stored data have them or not."""
    run = _searched(known, dataclasses.replace(settings, search=search), order, 0)
    return tuple(o.name for o in run.outcomes.values())


def _trace(known: Known, settings: Settings, order: Order, number: int) -> Trace:
    """Return what a search finds with its offers in this order. ``number`` distinguishes random ones."""
    run = _searched(known, settings, order, number)
    return Trace(regrets=tuple(run.regrets), unknown=run.unknown)


def _searched(known: Known, settings: Settings, order: Order, number: int) -> "_Run":
    """Return a search that has run to its end."""
    assert known.problem is not None
    device = device_of(known.fingerprint)
    offers_of = tried_offers if order == "tuning" else offers_for
    offers = offers_of(known.problem, device, settings, on_this_machine=False)
    trials = trials_for(known.problem, device, settings, offers.choices) if order == "tuning" else None
    made = Candidates(problem=known.problem, device=device, settings=settings, offers=offers, choices={}, known={}, trials=trials)
    run, listed = _Run(known, made), list(offers.choices)
    if order == "random":
        random.Random(number).shuffle(listed)
    while listed := made.untried(run.outcomes) if order == "tuning" else [c for c in listed if c.content_hash not in run.outcomes]:
        run.examine(sorted(listed, key=lambda choice: not choice.baseline))
    for _ in range(EFFORT[settings.search].variant_rounds):
        run.examine(untried_variants(run.candidates.choices, run.outcomes, settings))
    return run


class _Run:
    """One search: the real steps of a tuning, with stored times in place of measurements."""

    def __init__(self, known: Known, candidates: Candidates) -> None:
        self.candidates = candidates
        self.outcomes: dict[str, Outcome] = {}
        self.regrets: list[float] = []
        self.unknown = 0
        self._rows: dict[str, Row] = {row.name: row for row in known.rows}
        self._least_us = right(map(outcome_of, known.rows))[0].time_us or 0.0

    def examine(self, choices: Sequence[Choice]) -> None:
        """Give choices their stored outcomes, one after the other."""
        self.candidates = dataclasses.replace(
            self.candidates, choices={**self.candidates.choices, **{c.content_hash: c for c in choices}}
        )
        for choice in choices:
            self._look_up(choice)

    def _look_up(self, choice: Choice) -> None:
        row = self._rows.get(choice.name)
        if row is None:
            self.unknown += 1
            self.outcomes[choice.content_hash] = Outcome(
                name=choice.name, backend=choice.backend, content_hash=choice.content_hash, status=Status.REFUSED, reason=UNKNOWN
            )  # fmt: skip
            return
        self.outcomes[choice.content_hash] = dataclasses.replace(outcome_of(row), content_hash=choice.content_hash)
        if row.time_us is not None:
            regret = row.time_us / self._least_us - 1
            self.regrets.append(min(regret, self.regrets[-1]) if self.regrets else regret)
