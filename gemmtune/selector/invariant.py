"""Selection of one choice for every M of a range, so that the bits of a row do not depend on its batch."""

from __future__ import annotations

import dataclasses
import math
import random

from ..choice import Choice, Status
from ..errors import NoValidChoicesError
from .proof import failures_of, legal_runs, rows_to_check, tile_rows
from .range_work import SEED, Work, measured, segment_of, uncompiled, with_kernels
from .remote import open_session
from .segments import Segment, Table

COMPETING_ROWS = 5
"""Number of Ms at which choices compete to be the single one."""
ENTRANTS = 6
"""Number of choices that are timed at all of these Ms."""
MOST_COMPARED = 512
"""Maximum number of rows whose bits are compared."""


def competing_rows(rows: list[int]) -> list[int]:
    """Return at most COMPETING_ROWS of the Ms for the competition: both ends, and others about the same factor apart."""
    ratio = rows[-1] / rows[0]
    wanted = (rows[0] * ratio ** (i / (COMPETING_ROWS - 1)) for i in range(COMPETING_ROWS))
    return sorted({min(rows, key=lambda m: abs(math.log(m / x))) for x in wanted})


def one_for_all(work: Work) -> Table:
    """Return a table of one segment: the fastest choice overall that declares batch invariance and passes the check of it.

    Raises:
        NoValidChoicesError: there is none.
    """
    rows = range(work.rows[0], work.rows[-1] + 1)
    refused: dict[str, str] = {}
    entrants: list[str] = []
    for name in sorted(work.choices, key=lambda name: _loss(work, name)):
        choice = work.choices[name]
        reasons = (reason for _, reason in legal_runs(choice, rows, work.rows_class, work.device) if reason is not None)
        why_not = "does not declare to be batch-invariant" if not choice.batch_invariant else next(reasons, None)
        if why_not is not None:
            refused[name] = why_not
        elif len(entrants) < ENTRANTS:
            entrants.append(name)
    for m in work.results:
        if any(name not in work.times[m] for name in entrants) and len(entrants) > 1:
            work.times[m] = dict(measured(work, m, entrants))
    work.close()
    for name in sorted(entrants, key=lambda name: _loss(work, name)):
        segment = with_kernels(work, segment_of(work, name, rows[0], rows[-1]))
        checked = rows_to_check(segment, work.rows_class, tile_rows(work.choices[name]), random.Random(SEED))
        why_not = _why_not(work, segment, checked)
        if why_not is None:
            return Table(segments=(dataclasses.replace(segment, checked=checked),), seed=SEED)
        work.wrong[name] = refused[name] = why_not
    left_out = [(name, str(Status.REFUSED), reason) for name, reason in refused.items()]
    remedy = "Enable more backends (settings.backends). Torch cannot replace them: its bits of a row depend on the batch."
    raise NoValidChoicesError(f"{work.rows_class}, M = {rows[0]}..{rows[-1]}, batch-invariant", left_out, remedy)


def _loss(work: Work, name: str) -> float:
    """Return the mean logarithm of the slowdown against the best. An M without a measurement counts as a slowdown of e."""
    losses = [math.log(times[name] / min(times.values())) if name in times else 1.0 for times in work.times.values()]
    return sum(losses) / len(losses)


def _why_not(work: Work, segment: Segment, checked: tuple[int, ...]) -> str | None:
    """Return why the choice is wrong for some M or gives a row other bits in another batch; None if it passes."""
    choice = work.choices[segment.name]
    failed = uncompiled(work, [segment]) or failures_of([(choice, checked)], work.rows_class, work.device, work.settings)
    if failed:
        return next(iter(failed.values()))
    compared = [m for m in checked if m <= max(MOST_COMPARED, checked[0])]
    whole, *parts = (work.at(segment.name, m) for m in reversed(compared))
    assert isinstance(whole, Choice)
    with open_session(whole.problem, work.device, work.settings) as session:
        sample = session.same_rows(whole, [part for part in parts if isinstance(part, Choice)])
    return None if sample.status is Status.OK else sample.reason
