"""Selection of the fastest choices of one reduction class, so that the bits of a row do not depend on its batch."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..choice import Choice, Status
from ..errors import NoValidChoicesError
from ..numerics.reduction import Reduction
from ..timing.rounds import TIE
from .observed_rows import MOST_OBSERVED, ObservedRows, equal_rows
from .precompile import precompile
from .proof import rows_to_check, tile_rows
from .range_work import SEED, Work, measured, ready_ahead
from .reduction_classes import (
    MISSING,
    Offered,
    class_of,
    likeliest_in,
    likely_classes,
    members_of,
    offered_at,
    ranked,
    reference_of,
    top_row,
)
from .remote import open_session
from .segments import Table

ENTRANTS = 3
"""Number of choices of each class that are timed at a tuned M. At other Ms each neighbour has as many."""
MOST_TRIED = 8
"""Number of classes that are tried until one has a choice for every M."""
MOST_BETWEEN = 2
"""Number of classes that compete between the tuned Ms."""
LEAST_LISTED, MOST_HALFWAY = 16, 128
"""Least M between the tuned ones at which the likeliest choices of a class compete, at powers of two. Up to the second one, where
tiles fit few rows, also at the M halfway between two powers."""

Make = Callable[[Work], Table]
"""Function that makes the table of the choices that a range in progress has, each legal and proved over its intervals."""


def sample_classes(work: Work, others: Sequence[int]) -> None:
    """Time the best choices of the likeliest classes next to each other, at the tuned Ms and at ``others`` between them."""
    offered = {m: offered_at(work, m) for m in work.results}
    classes = likely_classes(work, offered)
    listed = _listed(work, offered, classes)
    for m in work.results:
        _time(work, m, [*_entrants_at_tuned(work, m, classes), *listed[m]])
    work.close()
    classes = ranked(work)[:MOST_BETWEEN]
    first = [m for m in others if _is_listed(m) or m == work.rows[-1]]
    others = [*first, *(m for m in others if m not in first)]
    listed = _listed(work, {m: offered_at(work, m) for m in first}, classes)
    for i, (m, ready) in enumerate(zip(others, ready_ahead(work, others), strict=True)):
        work.progress.stage("sampled M", i, len(others))
        _time(work, m, [*_entrants_between(work, m, classes, ready), *listed.get(m, ())])
        if work.times.get(m):
            work.sampled.append(m)
    if others:
        work.progress.stage("sampled M", len(others), len(others))


def _is_listed(m: int) -> bool:
    """Return True if the likeliest choices of each class compete at an M between the tuned ones."""
    halfway = m <= MOST_HALFWAY and m % 3 == 0 and (m // 3).bit_count() == 1
    return m >= LEAST_LISTED and (m.bit_count() == 1 or halfway)


def _listed(work: Work, offered: Mapping[int, Offered | None], classes: Sequence[Reduction]) -> dict[int, list[str]]:
    """Return the names of the likeliest choices of the classes by M, compiled together."""
    found = {m: likeliest_in(work, m, here, classes) for m, here in offered.items()}
    failures = precompile([choice for choices in found.values() for choice in choices], work.settings)
    return {m: [work.take(m, choice) for choice in choices if choice.name not in failures] for m, choices in found.items()}


def invariant_table(work: Work, make: Make) -> Table:
    """Return the table of the class with the least total loss. Every choice gives rows the bits of the class's reference.

    Undeclared choices join it where their bits are equal; classes that fail are left out. Raises NoValidChoicesError if none covers
    the range.
    """
    work.close()
    choices, times, refused = dict(work.choices), dict(work.times), dict[str, str]()
    likely = [x for x in ranked(work) if work.agreed in ("", str(x))]
    if work.agreed and not likely:
        refused[work.agreed] = "another stored table of this product has this class, and no choice declares it for these rows"
    for reduction in likely[:MOST_TRIED]:
        work.choices, work.times = choices, times
        try:
            return _table_of(work, reduction, make)
        except NoValidChoicesError as error:
            refused[str(reduction)] = "; ".join(f"{name}: {reason}" for name, _, reason in error.left_out[:2])
    undeclared = [name for name, choice in choices.items() if class_of(choice) is None]
    refused |= {name: work.wrong.get(name, "declares no reduction, and no class has its bits at every M") for name in undeclared}
    left_out = [(name, str(Status.REFUSED), reason) for name, reason in refused.items()]
    where = f"{work.rows_class}, M = {work.rows[0]}..{work.rows[-1]}, batch-invariant"
    remedy = "Enable more backends (settings.backends), tune a smaller range of M, or declare the reduction of a kernel of yours."
    remedy = f"Pass rows that are contiguous in memory, or use another store. {remedy}" if work.agreed else remedy
    raise NoValidChoicesError(where, left_out, f"{remedy} Torch cannot replace them: its bits of a row depend on the batch.")


def _time(work: Work, m: int, names: Iterable[str]) -> None:
    times = measured(work, m, list(dict.fromkeys(names)))
    if times:
        work.times[m] = dict(times)


def _entrants_at_tuned(work: Work, m: int, classes: Sequence[Reduction]) -> Iterator[str]:
    """Yield the finalists, and for each class its own measured choices, and those of other Ms."""
    rough = work.rough.get(m, {})
    fastest = sorted(rough, key=rough.__getitem__)
    yield from itertools.islice((name for name in fastest if name in work.times.get(m, {})), ENTRANTS)
    yield from ([work.baseline] if work.baseline in rough else [])
    for reduction in classes:
        members = members_of(work, reduction)
        yield from [name for name in fastest if name in members][:ENTRANTS]
        others = [name for name in members if name not in rough]  # in a fixed order, which decides between equals
        elsewhere = sorted(others, key=lambda name: abs(math.log(work.found_at[name] / m)))
        yield from [name for name in elsewhere if isinstance(work.at(name, m), Choice)][:ENTRANTS]


def _entrants_between(work: Work, m: int, classes: Sequence[Reduction], ready: Iterable[Choice]) -> Iterator[str]:
    """Yield the best choices of each class and of none at the neighbours of an M, the baseline, and what is ready."""
    yield from ([work.baseline] if work.baseline else [])
    measured_at = sorted(x for x in work.times if x != m)
    near = [*[x for x in measured_at if x < m][-1:], *[x for x in measured_at if x > m][:1]]
    for reduction, x in itertools.product((None, *classes), near):
        times = work.right(x)
        of_class = (name for name in sorted(times, key=times.__getitem__) if class_of(work.choices[name]) == reduction)
        yield from itertools.islice((name for name in of_class if isinstance(work.at(name, m), Choice)), ENTRANTS)
    yield from (work.take(m, choice) for choice in ready if class_of(choice) in (None, *classes))


def _table_of(work: Work, reduction: Reduction, make: Make) -> Table:
    """Return the proved table of one class. A reference that differs from itself is excluded, and another one is taken."""
    choices, times, known = work.choices, work.times, dict(work.wrong)
    while True:
        work.choices, work.times = choices, times
        reference = reference_of(work, members_of(work, reduction))
        if reference is None:
            reasons = [(name, "wrong", work.wrong[name]) for name in work.wrong if class_of(choices.get(name)) == reduction]
            here = f"no choice of the class is legal for M = {work.rows[-1]}"
            raise NoValidChoicesError(str(work.rows_class), reasons or [(str(reduction), str(Status.REFUSED), here)])
        failed = _joined(work, reduction, reference, make)
        if isinstance(failed, Table):
            return dataclasses.replace(failed, reduction=str(reduction))
        known[reference] = failed
        work.wrong = dict(known)  # what differs from this reference may be right


def _joined(work: Work, reduction: Reduction, reference: str, make: Make) -> Table | str:
    """Return the table of the choices with the bits of a reference, or why the reference does not have its own bits."""
    whole = work.at(reference, top_row(work))
    assert isinstance(whole, Choice)
    rows = [work.rows_class.within(work.rows)[0], *sorted(work.times), whole.problem.m]
    if (reason := _other_bits(work, whole, [(reference, rows)]).get(reference)) is not None:
        return reason
    members = members_of(work, reduction)
    members += [name for other in _equal_classes(work, whole, reduction) for name in members_of(work, other)]
    allowed = {name: work.choices[name] for name in members} | _observed(work, whole, members)
    work.choices = allowed
    work.times = {m: {name: us for name, us in here.items() if name in allowed} for m, here in work.times.items()}
    while True:
        table, generator = make(work), random.Random(SEED)
        more = ((x, rows_to_check(x, work.rows_class, tile_rows(work.choices[x.name]), generator)) for x in table.segments)
        failed = _other_bits(work, whole, [(x.name, (*x.checked, *rows)) for x, rows in more])
        if not failed:
            return table
        if reference in failed:
            return failed[reference]
        work.wrong |= failed


def _equal_classes(work: Work, whole: Choice, reduction: Reduction) -> list[Reduction]:
    """Return the other classes whose best choice has this class's bits at every sample, although their declarations differ."""
    found = []
    with open_session(whole.problem, work.device, work.settings) as session:
        for other in ranked(work)[:MOST_TRIED]:
            names = members_of(work, other) if other != reduction else []
            best = next((name for m in sorted(work.times) for name in names if name in work.times[m]), None)
            rows = [m for m in sorted(work.times) if m <= whole.problem.m]
            parts = [at for m in rows if best is not None and isinstance(at := work.at(best, m), Choice)]
            if parts and session.same_rows(whole, parts).status is Status.OK:
                found.append(other)
    return found


def _observed(work: Work, whole: Choice, members: Sequence[str]) -> dict[str, Choice]:
    """Return the choices that declare nothing, are faster than the class somewhere, and have its bits at every M around there.

    None for groups: their sizes differ in calls with one M, and cannot all be compared.
    """
    if work.rows_class.problem.groups:
        return {}
    gains: dict[str, float] = {}
    near: dict[str, set[int]] = {}
    sampled = sorted(work.times)
    for before, m, after in zip([work.rows[0], *sampled], sampled, [*sampled[1:], work.rows[-1]], strict=False):
        own = min((us for name, us in work.times[m].items() if name in members), default=math.inf)
        for name, us in work.right(m).items():
            if class_of(work.choices[name]) is None and us * (1 + TIE) < own:
                gains[name] = gains.get(name, 0.0) + min(math.log(own / us), MISSING)
                near.setdefault(name, set()).update(work.rows_class.within(range(before, after + 1)))
    found: dict[str, Choice] = {}
    for name in sorted(gains, key=gains.__getitem__, reverse=True)[:MOST_OBSERVED]:
        rows = equal_rows(work, whole, work.choices[name], sorted(near[name]))
        if rows:
            found[name] = ObservedRows.of(work.choices[name], frozenset(rows))
        else:
            work.wrong.setdefault(name, f"its bits are not those of {whole.name} at M = {min(near[name])}..{max(near[name])}")
    return found


def _other_bits(work: Work, whole: Choice, jobs: Sequence[tuple[str, Iterable[int]]]) -> dict[str, str]:
    """Return the choices that give rows other bits than ``whole`` at some of their Ms, with the M and the row, by name."""
    failed: dict[str, str] = {}
    with open_session(whole.problem, work.device, work.settings) as session:
        for i, (name, rows) in enumerate(jobs):
            work.progress.stage("compare bits", i, len(jobs))
            compared = [m for m in dict.fromkeys(rows) if m <= whole.problem.m]
            sample = session.same_rows(whole, [at for m in compared if isinstance(at := work.at(name, m), Choice)])
            if sample.status is not Status.OK:
                failed.setdefault(name, sample.reason)
    return failed
