"""The choices for a problem, with the store's outcomes for them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..choice import Choice, Offers, Status
from ..device import DeviceInfo
from ..effort import CPU_ROUNDS, EFFORT
from ..filters import HEURISTIC
from ..problem import Problem
from ..settings import Settings, Timing
from ..store.key import fingerprint_text
from ..store.store import Row, Store, open_store
from .offers import enabled_backends, interleaved, known_variants, named_choice, widest_offers_for
from .pick import pick
from .result import ALONE, DISTURBED, LIMIT_S, LIMITS, SETTLED, Outcome
from .trials import Trials, trials_for, tried_offers

Retry = Literal["needed", "failed", "disturbed"]
"""Stored outcomes of a busy machine that do not count, so that they are measured again.

``needed``: failures that the machine caused, if one of them would decide the pick. ``failed``: all of these failures.
``disturbed``: times, too.
"""

NEAR = 1.25
"""Slowdown beyond which a kernel is dropped before the epilogue is tuned: the epilogue would not make it the fastest."""
MOST_NEAR = 8
"""Maximum number of kernels that are compiled with the epilogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The choices for a problem, enumerated once, with the store's outcomes for them."""

    problem: Problem
    device: DeviceInfo
    settings: Settings
    offers: Offers
    """Choices that the settings ask to try."""
    choices: Mapping[str, Choice]
    """All choices by content hash: the offers, and every other legal choice with a row in the store, variants included."""
    known: Mapping[str, Outcome]
    """Known outcomes by content hash."""
    closed: bool = False
    """True if only the offers and their variants count, whatever else the store knows."""
    host_us: float = 0.0
    """Host time that gemmtune adds to a call, if times are those of whole calls; otherwise 0."""
    trials: Trials | None = None
    """Offers that are tried first, by shipped measurements."""
    deadline: float = math.inf
    """Time of ``time.monotonic`` after which no choice is examined except torch's own."""

    @property
    def only(self) -> Choice | None:
        """The only choice, if it may run without a measurement or a proof: torch's own operation, or the fixed config."""
        if len(self.offers.choices) != 1:
            return None
        [choice], settings = self.offers.choices, self.settings
        fixed = self.problem.widens_b and settings.mixed_mm_choice == HEURISTIC
        return choice if choice.baseline or fixed or not settings.verify else None

    @property
    def picked(self) -> Choice | None:
        """The fastest correct choice among the known outcomes."""
        outcome = pick(list(self.known.values()))
        return self.choices[outcome.content_hash] if outcome else None

    @property
    def missing(self) -> list[Choice]:
        """The offers that are tried next."""
        return self.untried(self.known)

    def untried(self, outcomes: Mapping[str, Outcome]) -> list[Choice]:
        """Return the offers to try next, in order: those favoured by shipped measurements, then the others unless these suffice."""
        left = interleaved([c for c in self.offers.choices if c.content_hash not in outcomes])
        if self.trials is None:
            return left
        by_name = {c.name: c for c in left}
        first = [by_name[name] for name in self.trials.first if name in by_name]
        return first or ([] if self.trials.suffice(outcomes.values()) else left)

    @property
    def complete(self) -> bool:
        """True if nothing remains to measure: every offer has an outcome that was compared with the others."""
        return not self.missing and all(o.settled for o in self.known.values())

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def within(self, seconds: float) -> Candidates:
        """Return the candidates with a deadline, so that the final rounds end within about so many seconds from now."""
        rounds_s = EFFORT[self.settings.search].rounds_s * (CPU_ROUNDS if self.device.type == "cpu" else 1.0)
        return dataclasses.replace(self, deadline=time.monotonic() + max(seconds / 2, seconds - rounds_s))

    @property
    def fingerprint(self) -> str:
        """The machine and the timing mode under which outcomes compare, in the store's format."""
        return fingerprint_text(self.device, self.settings.timing)

    def stored(self, store: Store, *, retry: Retry = "needed") -> Candidates:
        """Return the candidates with the store's current outcomes. Enumerate again only to find choices of a wider search.

        ``search`` and ``max_profiling_configs`` limit the trials, not the pick: a choice that an earlier, wider search measured
        remains a candidate. Every choice has its current name, whatever its name was when it was measured, because the regexes of
        the settings match current names. With ``tune="force"`` stored outcomes do not count.
        """
        # Select the rows that count.
        rows = {} if self.settings.tune == "force" else store.rows(self.problem.key, self.fingerprint)
        rows = without_accidents({digest: row for digest, row in rows.items() if not _retried(row, retry, self.settings)})
        choices = dict(self.choices)
        # Find the choice of each row: among offers and their variants, then in the widest search.
        choices |= known_variants(self.offers.choices, rows.keys() - choices, self.settings)
        if rows.keys() - choices and not self.closed:
            wider = widest_offers_for(self.problem, self.device, self.settings).choices
            choices |= {c.content_hash: c for c in wider if c.content_hash in rows}
            choices |= known_variants(wider, rows.keys() - choices, self.settings)
        # Convert the rows to outcomes with current names.
        known = {
            digest: dataclasses.replace(outcome_of(row), name=choices[digest].name)
            for digest, row in rows.items()
            if digest in choices
        }
        # A choice that was the only correct one has rivals now, or some that are not measured yet.
        missing = any(choice.content_hash not in known for choice in self.offers.choices)
        if missing or sum(o.status is Status.OK for o in known.values()) > 1:
            known = {digest: opened(o) if o.info.get(SETTLED) == ALONE else o for digest, o in known.items()}
        return dataclasses.replace(self, choices=choices, known=_reopened(known))

    def partial(self) -> str:
        """Return the part of the offers that is not measured or compared yet, as text; empty if nothing is missing."""
        if self.missing:
            return f"{len(self.missing)} of {len(self.offers.choices)} choices are not measured yet"
        return "" if self.complete else "the choices near the fastest are not all measured yet"

    def narrowed(self, alone: Candidates) -> Candidates:
        """Return the candidates near the fastest without an epilogue. A pointwise epilogue adds about the same time to each."""
        times = {o.name: o.time_us for o in alone.known.values() if o.time_us and alone.choices[o.content_hash].compile_key}
        least = min(times.values(), default=0.0)
        near = sorted((name for name, time_us in times.items() if time_us <= NEAR * least), key=times.__getitem__)
        offered = [c.name for c in self.offers.choices if c.compile_key]
        names = [name for name in near if name in offered][:MOST_NEAR]
        if not names:
            return self
        kept = tuple(c for c in self.offers.choices if not c.compile_key or c.name in names)
        return dataclasses.replace(self, offers=dataclasses.replace(self.offers, choices=kept))

    def stored_anyhow(self, store: Store) -> Candidates:
        """Return ``stored``. If it knows nothing, return outcomes of the other kernel timing (``timings_of``)."""
        found, (_, *others) = self.stored(store), timings_of(self.settings)
        if found.known or not others:
            return found
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, timing=others[0])).stored(store)


KERNEL_TIMINGS: tuple[Timing, ...] = ("graph", "spaced")
"""Timing modes of kernels, in isolation and next to others. The fastest by one mode is rarely much slower by the other."""


def timings_of(settings: Settings) -> tuple[Timing, ...]:
    """Return the timing modes whose results serve, that of the settings first."""
    return tuple(dict.fromkeys((settings.timing, *(KERNEL_TIMINGS if settings.timing in KERNEL_TIMINGS else ()))))


def opened(o: Outcome) -> Outcome:
    """Return an outcome that is still to be compared with others."""
    return dataclasses.replace(o, info={key: value for key, value in o.info.items() if key != SETTLED})


def _reopened(known: dict[str, Outcome]) -> dict[str, Outcome]:
    """Return the outcomes. If filters left torch alone, those that lost only to choices that may not run now are reopened."""
    torch_us = [o.time_us for o in known.values() if o.baseline and o.time_us]
    if not torch_us or any(o.finalist and not o.baseline for o in known.values()):
        return known
    return {digest: o if o.baseline or o.time_us is None or o.time_us > min(torch_us) else opened(o) for digest, o in known.items()}


def candidates_for(problem: Problem, device: DeviceInfo, settings: Settings, *, host_us: float = 0.0) -> Candidates:
    """Return the choices for a problem, without outcomes."""
    offers = tried_offers(problem, device, settings)
    choices, trials = {c.content_hash: c for c in offers.choices}, trials_for(problem, device, settings, offers.choices)
    found = Candidates(problem=problem, device=device, settings=settings, offers=offers, choices=choices, known={}, host_us=host_us)
    return dataclasses.replace(found, trials=trials)


def choice_of(
    content_hash: str, backend: str, problem: Problem, device: DeviceInfo, settings: Settings, *, name: str = ""
) -> Choice | None:
    """Return the choice with that hash: an offer of its backend, or a variant of one.

    A ``name`` that states the whole config spares the enumeration, which takes a tenth of a second. Else only this backend
    enumerates. With a name the choice may also be of an exhaustive search. None: the settings exclude the choice.
    """
    if backend not in enabled_backends(device, settings):
        return None
    made = named_choice(name, backend, problem, device, settings) if name else None
    if made is not None and made.content_hash == content_hash:
        return made
    found = candidates_for(problem, device, dataclasses.replace(settings, backends=(backend,)))
    choice = found.choices.get(content_hash) or known_variants(found.offers.choices, {content_hash}, settings).get(content_hash)
    choice = choice or found.stored(open_store(settings)).choices.get(content_hash)
    if choice is not None or not name:
        return choice
    widest = widest_offers_for(problem, device, dataclasses.replace(settings, backends=(backend,))).choices
    near = (c for c in widest if c.name.partition("_pdl")[0] == name.partition("_pdl")[0])
    named = (x for c in near for x in (c, *c.launch_variants()) if x.name == name)
    return next((x for x in named if x.content_hash == content_hash), None)


def _retried(row: Row, retry: Retry, settings: Settings) -> bool:
    """Return True if the row is to be measured again: it is of a busy machine, or exceeded a smaller time limit than today's."""
    if row.status in LIMITS:
        limit_s = row.info.get(LIMIT_S)  # earlier versions did not store it
        if not isinstance(limit_s, (int, float)) or getattr(settings, LIMITS[row.status]) > limit_s:
            return True
    return bool(row.info.get(DISTURBED)) and (retry == "disturbed" or (retry == "failed" and row.status is not Status.OK))


def without_accidents(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Return the rows without failures that the machine caused, if one of them would decide the pick.

    Torch's own operation is measured again, so that no kernel is picked unopposed. All are, if nothing else is known to work.
    """
    works = any(row.status is Status.OK for row in rows.values())
    return {
        digest: row
        for digest, row in rows.items()
        if row.status is Status.OK or not row.info.get(DISTURBED) or (works and not row.baseline)
    }


def outcome_of(row: Row) -> Outcome:
    """Convert a stored row to an outcome."""
    return Outcome(**{name: getattr(row, name) for name in _STORED}, from_store=True)


def row_of(outcome: Outcome, problem: Problem, fingerprint: str) -> Row:
    """Convert an outcome to a row for the store, measured now."""
    return Row(key=problem.key, fingerprint=fingerprint, **{name: getattr(outcome, name) for name in _STORED})


_STORED = tuple(field.name for field in dataclasses.fields(Outcome) if field.name != "from_store")
"""Fields that an outcome and its row share."""
