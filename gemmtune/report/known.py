"""Stored results of one problem on one machine, with the pick that calls would take."""

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..problem import Problem
from ..selector.candidates import outcome_of
from ..selector.pick import pick, right
from ..selector.result import Outcome
from ..store.row import stored_problem
from ..store.store import Row
from ..timing.neighbours import credible_ratio
from .names import problem_text


@dataclass(frozen=True, kw_only=True)
class Known:
    """Stored results of one problem on one machine."""

    key: str
    fingerprint: str
    rows: tuple[Row, ...]

    @property
    def problem(self) -> Problem | None:
        """The problem, None if another version wrote it."""
        return stored_problem(self.key)

    @functools.cached_property
    def outcomes(self) -> list[Outcome]:
        """Correct choices, the pick first and the others by time."""
        ordered = right(map(outcome_of, self.rows))
        chosen = pick(ordered)
        return sorted(ordered, key=lambda o: o is not chosen)

    @property
    def torch_us(self) -> float | None:
        """Direct time of torch's operation. None if the tuning was interrupted before its final rounds: any factor may be wrong."""
        ranked = any(o.finalist for o in self.outcomes)
        return next((o.direct_us for o in self.outcomes if o.baseline and ranked), None)

    @property
    def speedup_over_torch(self) -> float | None:
        """Direct time of torch's operation, divided by the time of the pick, as in ``ProblemResult``."""
        best_us = self.outcomes[0].time_us if self.outcomes else None
        return credible_ratio(self.torch_us, best_us, self.disturbed)

    @property
    def disturbed(self) -> str:
        """The disturbance of the pick's measurement, or of torch's; empty if none was seen."""
        return next((o.disturbed for i, o in enumerate(self.outcomes) if (i == 0 or o.baseline) and o.disturbed), "")

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with all fields of the choices' rows."""
        return {
            "problem": {"text": problem_text(self.key)} | json.loads(self.key),
            "machine": json.loads(self.fingerprint),
            "pick": self.outcomes[0].name if self.outcomes else None,
            "speedup_over_torch": self.speedup_over_torch,
            "disturbed": self.disturbed,
            "choices": [row.in_group() for row in self.rows],
        }


def known_by_date(rows: Iterable[Row]) -> list[Known]:
    """Return the results by problem and machine, the latest measurement last."""
    return sorted(known_of(rows), key=lambda known: max(row.measured_at for row in known.rows))


def known_of(rows: Iterable[Row]) -> list[Known]:
    """Return the results by problem and machine, in the order of the rows."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.scope, []).append(row)
    return [Known(key=key, fingerprint=machine, rows=tuple(group)) for (key, machine), group in groups.items()]
