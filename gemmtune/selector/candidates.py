"""The choices for a problem together with what the store knows of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..choice import Choice, Offers
from ..device import DeviceInfo
from ..problem import Problem
from ..settings import Settings
from ..store.key import fingerprint_text, now
from ..store.store import Row, Store
from .offers import offers_for, widest_offers_for
from .result import Outcome
from .variants import known_variants

__all__ = ["Candidates", "known_candidates", "row_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The choices for a problem and what the store knows of them."""

    offers: Offers
    """What the settings ask to try."""
    choices: Mapping[str, Choice]
    """By content hash: the offers, and everything else legal that the store has a row for, variants included."""
    known: Mapping[str, Outcome]
    """By content hash."""

    def chosen(self, outcome: Outcome | None) -> Choice | None:
        """The choice of an outcome."""
        return self.choices.get(outcome.content_hash) if outcome else None

    @property
    def missing(self) -> list[Choice]:
        """The offers without an outcome."""
        return [c for c in self.offers.choices if c.content_hash not in self.known]

    def including(self, more: Sequence[Choice]) -> Candidates:
        """With choices that are no offers, such as variants."""
        return dataclasses.replace(self, choices={**self.choices, **{c.content_hash: c for c in more}})

    def complete(self) -> bool:
        """Nothing is left to measure: every offer has an outcome that was compared with the others."""
        return not self.missing and all(o.settled for o in self.known.values())


def known_candidates(problem: Problem, device: DeviceInfo, settings: Settings, store: Store) -> Candidates:
    """The choices for a problem with their stored outcomes. Nothing is measured.

    ``search`` and ``max_profiling_configs`` say how much is tried, not what may be picked: a choice that an earlier, wider search
    measured stays a candidate. Every choice has the name that it has now, whatever it was called when it was measured: that is the
    one that the regexes of the settings see.
    """
    offers = offers_for(problem, device, settings)
    rows = {} if settings.tune == "force" else store.rows(problem.key, fingerprint_text(device, settings.timing))
    choices = {c.content_hash: c for c in offers.choices}
    choices |= known_variants(offers.choices, set(rows) - set(choices), settings)
    if set(rows) - set(choices):
        wider = widest_offers_for(problem, device, settings).choices
        choices |= {c.content_hash: c for c in wider if c.content_hash in rows and c.content_hash not in choices}
        choices |= known_variants(wider, set(rows) - set(choices), settings)
    known = {
        digest: dataclasses.replace(outcome_of(row), name=choices[digest].name) for digest, row in rows.items() if digest in choices
    }
    return Candidates(offers=offers, choices=choices, known=known)


def outcome_of(row: Row) -> Outcome:
    """A stored row as an outcome."""
    return Outcome(
        name=row.name,
        backend=row.backend,
        content_hash=row.content_hash,
        status=row.status,
        time_us=row.time_us,
        error_over_bound=row.error_over_bound,
        reason=row.reason,
        finalist=row.finalist,
        baseline=row.baseline,
        from_store=True,
        info=row.info,
    )


def row_of(outcome: Outcome, problem: Problem, fingerprint: str) -> Row:
    """An outcome as a row to store."""
    return Row(
        key=problem.key,
        fingerprint=fingerprint,
        name=outcome.name,
        backend=outcome.backend,
        content_hash=outcome.content_hash,
        status=outcome.status,
        time_us=outcome.time_us,
        error_over_bound=outcome.error_over_bound,
        finalist=outcome.finalist,
        baseline=outcome.baseline,
        reason=outcome.reason,
        info=outcome.info,
        measured_at=now(),
    )
