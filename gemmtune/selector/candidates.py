"""The choices for a problem together with what the store knows of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from ..choice import Choice, Offers, Status
from ..device import DeviceInfo
from ..filters import HEURISTIC
from ..problem import Problem
from ..settings import Settings, Timing
from ..store.key import fingerprint_text
from ..store.store import Row, Store
from .offers import enabled_backends, known_variants, moved_choices, offers_for, widest_offers_for
from .pick import pick
from .result import ALONE, DISTURBED, SETTLED, Outcome

NEAR = 1.25
"""A kernel that is slower than the fastest by this factor does not win by an epilogue, …"""
MOST_NEAR = 8
"""… nor do more than so many deserve a compilation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The choices for a problem, enumerated once, and what the store knows of them."""

    problem: Problem
    device: DeviceInfo
    settings: Settings
    offers: Offers
    """What the settings ask to try."""
    choices: Mapping[str, Choice]
    """The choices by content hash: the offers, and everything else legal that the store has a row for, variants included."""
    known: Mapping[str, Outcome]
    """The outcomes by content hash."""
    closed: bool = False
    """Nothing but the offers counts, whatever else the store knows."""
    host_us: float = 0.0
    """What a call of gemmtune costs the host beside its kernel, where times are those of whole calls."""

    @property
    def only(self) -> Choice | None:
        """The choice that is taken without a measurement, because there is no other: torch's own operation, or the fixed config.

        Any other choice has to be proved right, also where it is the only one.
        """
        if len(self.offers.choices) != 1:
            return None
        [choice], settings = self.offers.choices, self.settings
        fixed = self.problem.widens_b and settings.mixed_mm_choice == HEURISTIC
        return choice if choice.baseline or fixed or not settings.verify else None

    @property
    def picked(self) -> Choice | None:
        """The pick among what is known."""
        outcome = pick(list(self.known.values()))
        return self.choices[outcome.content_hash] if outcome else None

    @property
    def missing(self) -> list[Choice]:
        """The offers without an outcome."""
        return [c for c in self.offers.choices if c.content_hash not in self.known]

    @property
    def complete(self) -> bool:
        """Nothing is left to measure: every offer has an outcome that was compared with the others."""
        return not self.missing and all(o.settled for o in self.known.values())

    @property
    def fingerprint(self) -> str:
        """The machine and the timing under which outcomes compare, as the store has it."""
        return fingerprint_text(self.device, self.settings.timing)

    def stored(self, store: Store, *, reliable: bool = False) -> Candidates:
        """The candidates with what the store knows by now; nothing is enumerated again but what only a wider search offers.

        ``search`` and ``max_profiling_configs`` say how much is tried, not what may be picked: a choice that an earlier, wider
        search measured stays a candidate. Every choice has the name that it has now, whatever it was called when it was measured:
        that is the one that the regexes of the settings see. With ``tune="force"`` what the store knows does not count, and with
        ``reliable`` what was measured on a busy machine does not.
        """
        rows = {} if self.settings.tune == "force" else store.rows(self.problem.key, self.fingerprint)
        rows = {digest: row for digest, row in rows.items() if not (reliable and row.info.get(DISTURBED))}
        choices = dict(self.choices)
        if self.closed:
            rows = {digest: row for digest, row in rows.items() if digest in choices}
        choices |= known_variants(self.offers.choices, rows.keys() - choices, self.settings)
        choices |= moved_choices(choices, rows, self.device, self.settings)
        if rows.keys() - choices:
            wider = widest_offers_for(self.problem, self.device, self.settings).choices
            choices |= {c.content_hash: c for c in wider if c.content_hash in rows}
            choices |= known_variants(wider, rows.keys() - choices, self.settings)
            choices |= moved_choices(choices, rows, self.device, self.settings)
        known = {
            digest: dataclasses.replace(outcome_of(row), name=choices[digest].name)
            for digest, row in rows.items()
            if digest in choices
        }
        missing = any(choice.content_hash not in known for choice in self.offers.choices)
        return dataclasses.replace(self, choices=choices, known=_reopened(_compared(known, missing=missing)))

    def narrowed(self, alone: Candidates) -> Candidates:
        """The candidates with those compiled offers alone that were near the fastest of the product without an epilogue.

        A pointwise epilogue adds about the same to each, so that the others would not win with it either.
        """
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
        """What ``stored`` finds; if that is nothing, what is known of kernels that were timed beside others, or by themselves."""
        found, other = self.stored(store), _OTHER_TIMING.get(self.settings.timing)
        if found.known or other is None:
            return found
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, timing=other)).stored(store)


_OTHER_TIMING: Mapping[Timing, Timing] = {"graph": "spaced", "spaced": "graph"}


def _compared(known: Mapping[str, Outcome], *, missing: bool) -> dict[str, Outcome]:
    """The outcomes, that which was the only right one unsettled where there are others now, or some are ``missing``."""
    others = missing or sum(o.status is Status.OK for o in known.values()) > 1
    return {digest: _opened(o) if others and o.info.get(SETTLED) == ALONE else o for digest, o in known.items()}


def _opened(o: Outcome) -> Outcome:
    return dataclasses.replace(o, info={key: value for key, value in o.info.items() if key != SETTLED})


def _reopened(known: dict[str, Outcome]) -> dict[str, Outcome]:
    """The outcomes, those among them unsettled that lost to none who may run.

    Filters may leave torch alone of all that were ranked. What was faster than torch at a first look and dropped for the sake of
    others has then to be ranked again.
    """
    torch_us = [o.time_us for o in known.values() if o.baseline and o.time_us]
    if not torch_us or any(o.finalist and not o.baseline for o in known.values()):
        return known
    return {
        digest: o if o.baseline or o.time_us is None or o.time_us > min(torch_us) else _opened(o) for digest, o in known.items()
    }


def candidates_for(problem: Problem, device: DeviceInfo, settings: Settings, *, host_us: float = 0.0) -> Candidates:
    """The choices for a problem, of which nothing is known yet."""
    offers = offers_for(problem, device, settings)
    choices = {c.content_hash: c for c in offers.choices}
    return Candidates(problem=problem, device=device, settings=settings, offers=offers, choices=choices, known={}, host_us=host_us)


def choice_of(
    content_hash: str, backend: str, problem: Problem, device: DeviceInfo, settings: Settings, store: Store
) -> Choice | None:
    """The choice with that hash: what its backend offers for a problem, a variant of that, or what an earlier search went to.

    No other backend is asked: to enumerate for all of them takes a tenth of a second. None where the settings leave it out.
    """
    if backend not in enabled_backends(device, settings):
        return None
    found = candidates_for(problem, device, dataclasses.replace(settings, backends=(backend,)))
    choice = found.choices.get(content_hash) or known_variants(found.offers.choices, {content_hash}, settings).get(content_hash)
    return choice or found.stored(store).choices.get(content_hash)


def outcome_of(row: Row) -> Outcome:
    """A stored row as an outcome."""
    return Outcome(**{name: getattr(row, name) for name in _STORED}, from_store=True)


def row_of(outcome: Outcome, problem: Problem, fingerprint: str) -> Row:
    """An outcome as a row to store, measured now."""
    return Row(key=problem.key, fingerprint=fingerprint, **{name: getattr(outcome, name) for name in _STORED})


_STORED = tuple(field.name for field in dataclasses.fields(Outcome) if field.name != "from_store")
"""What an outcome and its row have in common."""
