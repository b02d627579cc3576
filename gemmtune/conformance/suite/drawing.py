"""Drawing cases of a property until one fails, and then the smallest that still does."""

from __future__ import annotations

import contextlib

import hypothesis
from hypothesis import HealthCheck, Phase

from ..cases.case import Case
from ..properties.property import Property
from ..runs.record import Record
from ..runs.run import Run
from .strategies import cases

__all__ = ["explore"]


MOST_SHRUNK = 100
"""Cases that are judged to find the smallest one."""


class _Found(Exception):
    """A drawn case failed."""


class _Explorer:
    """Judges each case once, so that hypothesis, which runs a failing case again, gets the same answer from a racing kernel."""

    def __init__(self, run: Run, wanted: Property) -> None:
        self.run = run
        self.wanted = wanted
        self.records: dict[Case, Record] = {}
        self.smallest: Record | None = None
        self.most = run.max_examples + MOST_SHRUNK

    def attempt(self, case: Case) -> None:
        """Fails where the case does. Once no more are run, cases that are new count as right, which ends the shrinking."""
        if case not in self.records:
            if self.run.ended(self.wanted.name) is not None:
                return
            if len(self.records) >= self.most:
                return
            self.records[case] = self.run.judge(case, drawn=True)
        record = self.records[case]
        if record.failed or record.surprise:
            self.smallest = record
            raise _Found


def explore(run: Run, wanted: Property) -> list[Record]:
    """What drawn cases of a property gave: all that did not fail and, where one did, the smallest that was found.

    Nothing is drawn where enumerated cases of the property have failed, unless a number of examples was asked for.
    """
    if run.established(wanted.name) and run.options.max_examples is None:
        return []
    explorer = _Explorer(run, wanted)

    @hypothesis.settings(
        max_examples=run.max_examples,
        derandomize=not run.options.random and run.options.seed is None,
        database=None,
        deadline=None,
        print_blob=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases(wanted, run.scope))
    def attempt(case: Case) -> None:
        explorer.attempt(case)

    if run.options.seed is not None:
        attempt = hypothesis.seed(run.options.seed)(attempt)
    # The first has its record, the second means that nothing can be drawn within what is declared.
    with contextlib.suppress(_Found, hypothesis.errors.Unsatisfiable):
        attempt()
    fine = [record for record in explorer.records.values() if not (record.failed or record.surprise)]
    return fine + ([explorer.smallest] if explorer.smallest is not None else [])
