"""Tuning of a range of M: samples, crossovers between them, a proof over each interval, and the table for the store."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence

from ..choice import Choice, Status
from ..device import DeviceInfo
from ..effort import EFFORT
from ..errors import InvalidProblemError, NoValidChoicesError
from ..filters import why_not_named
from ..problem.rows import RowClass
from ..settings import Settings
from ..store.store import Ranged, open_store
from ..timing.memory import require_memory_to_tune
from ..timing.rounds import BUSY_MARK
from .candidates import Candidates, Retry
from .crossover import complete, sampled_rows, spread
from .intervals import legal_segments, segments_by_time
from .invariant import invariant_table, sample_classes
from .locks import tuning_lock
from .machine_limits import MachineLimits
from .offers import enabled_backends
from .precompile import Compilation, precompile
from .progress import Progress
from .proof import failures_of, rows_to_check, tile_rows
from .range_result import RangeResult
from .range_work import SEED, Source, Work, measured, ready_ahead, uncompiled, with_kernels
from .remote import prepare_measuring
from .result import AGAIN, ProblemResult, without_pick
from .segments import INVARIANT, TABLE, Segment, Table, merged
from .select import select
from .siblings import Siblings
from .stored_tables import product_of, stored_class, stored_table

log = logging.getLogger("gemmtune")

WAITING = "another process tunes this range: waiting for it"
STALLED = 4.0
"""An M whose fastest choice takes so many times as long as that of a larger M was stalled by other work: a time slice has 4 ms."""
MOST_OF_NEIGHBOUR = 3
"""Number of the best choices of a neighbouring sample that compete at an M that is not fully tuned."""


def kind_of(settings: Settings) -> str:
    """Return the kind of table that the settings request."""
    return INVARIANT if settings.batch_invariant else TABLE


def tune_rows(
    rows_class: RowClass,
    rows: range,
    device: DeviceInfo,
    settings: Settings,
    progress: Progress,
    *,
    host_us: float = 0.0,
    recorded: Sequence[int] = (),
    source: Source | None = None,
    kind: str | None = None,
    limits: bool = False,
    retry: Retry = "needed",
    apart: float | None = None,
    compared: Sequence[int] = (),
    siblings: Siblings | None = None,
    agreed: str = "",
) -> RangeResult:
    """Return the table of a class for a range of M.

    A stored table is used if it covers the range and its choices still exist. Otherwise the range is measured and the table stored.
    ``recorded`` are Ms that are sampled in addition to the grid. ``source`` replaces the choices of the settings; the table is then
    stored as another ``kind``. With ``limits``, the limits of the machine are measured if the store has none. ``apart`` is the
    factor between two Ms at which all choices compete, by default that of the search effort; they also compete at ``compared``.
    ``agreed`` is the reduction class of a new batch-invariant table, unless other tables of the product have one.

    Raises InvalidProblemError if the class has none of the ``rows``, and NoValidChoicesError if nothing is correct at a tuned M.
    """
    if not rows_class.within(rows):
        raise InvalidProblemError(f"m: got {rows[0]}..{rows[-1]}, none of which is an M of {rows_class}")
    begun = time.perf_counter()
    machine = MachineLimits(device, settings, open_store(settings))
    work = Work(rows_class, rows, device, settings, host_us, progress, source, limits=machine)
    work.apart, work.compared, work.siblings, work.agreed = apart, compared, siblings, agreed
    kind, waiting = kind or kind_of(settings), functools.partial(progress.message, WAITING)
    locked = product_of(rows_class.key) if settings.batch_invariant else rows_class.key
    with tuning_lock(settings, f"{kind} {locked}", work.fingerprint, waiting):
        known = stored_table(rows_class, work.fingerprint, work.store, kind) if settings.tune != "force" else None
        if known is not None and not (known[0].disturbed and retry == "disturbed") and _serves(known[0], work):
            return RangeResult(rows_class=rows_class, table=known[0], seconds=time.perf_counter() - begun, source="store")
        found = _measured(work, (*recorded, *compared), limits=limits, retry=retry)
        work.store.put_ranged(Ranged(key=rows_class.key, fingerprint=work.fingerprint, kind=kind, value=found.table.to_json()))
    return dataclasses.replace(found, seconds=time.perf_counter() - begun)


def _measured(work: Work, recorded: Sequence[int], *, limits: bool, retry: Retry) -> RangeResult:
    invariant = work.settings.batch_invariant
    if invariant:
        work.agreed = stored_class(work.rows_class, work.device, work.settings, work.store, others=True) or work.agreed
    largest = work.rows_class.at(work.rows_class.within(work.rows)[-1])
    require_memory_to_tune([largest], work.device, work.settings)
    with contextlib.closing(work):
        _measure_samples(work, recorded, limits=limits, retry=retry)
        table = invariant_table(work, _table) if invariant else _table(work)
    return RangeResult(
        rows_class=work.rows_class,
        table=dataclasses.replace(table, disturbed=work.disturbed),
        tuned_results=tuple(work.results.values()),
        times={m: work.right(m) for m in sorted(work.times)},
        wrong=work.wrong,
        source="measured",
    )


def missing_kernels(
    rows_class: RowClass, rows: range, compared: Sequence[int], device: DeviceInfo, settings: Settings, siblings: Siblings
) -> list[Choice]:
    """Return the kernels that the table of a class needs first, for a compilation ahead."""
    work = Work(rows_class, rows, device, settings, 0.0, Progress(), compared=compared, siblings=siblings)
    tuned = _tuned_rows(work, sampled_rows(rows, rows_class.has, compared))
    return [choice for m in tuned for choice in work.candidates(m).offers.choices]


def _tuned_rows(work: Work, sampled: list[int]) -> list[int]:
    """Return the sampled Ms at which all choices compete."""
    apart = EFFORT[work.settings.search].rows_apart if work.apart is None else work.apart
    return sorted({*spread(sampled, apart, work.rows_class.at(sampled[0]).widens_b), *(m for m in work.compared if m in sampled)})


def _serves(table: Table, work: Work) -> bool:
    """Return True if a stored table covers the range and its choices, unless excluded, exist. Lost kernels are compiled again."""
    enabled, needed = enabled_backends(work.device, work.settings), []
    if not table.covers(filter(work.rows_class.has, work.rows)):
        return False
    for x in table.segments:
        choice = work.found(x)
        if choice is not None:
            legal = (choice.at(work.rows_class.at(m), work.device) for m in x.kernels)
            needed += [at for at in legal if isinstance(at, Choice)]
        elif work.source is not None or (x.backend in enabled and why_not_named(x.name, x.backend, work.settings) is None):
            log.info("%s: %s of the stored table is from another version: tuning the range again", work.rows_class, x.name)
            return False
    return not precompile(needed, work.settings)


def _measure_samples(work: Work, recorded: Sequence[int], *, limits: bool, retry: Retry) -> None:
    """Tune some Ms far apart as independent problems, while all kernels compile, then measure the Ms between them.

    There, the best choices of both neighbours compete with those that need no compilation.
    """
    sampled = sampled_rows(work.rows, work.rows_class.has, recorded)
    tuned = _tuned_rows(work, sampled)
    _tune(work, tuned, limits=limits, retry=retry)
    others = [m for m in sampled if m not in tuned] if len(work.choices) > 1 else []
    if work.settings.batch_invariant:
        sample_classes(work, others)
        return
    for i, (m, ready) in enumerate(zip(others, ready_ahead(work, others), strict=True)):
        work.progress.stage("sampled M", i, len(others))
        times = measured(work, m, _entrants(work, m, ready))
        if times:
            work.times[m] = dict(times)
            work.sampled.append(m)
    if others:
        _measure_stalled_again(work)
        _look_back(work)
        work.progress.stage("sampled M", len(others), len(others))


def _measure_stalled_again(work: Work) -> None:
    """Measure again, twice at most, the sampled Ms that other work stalled. Leave one that stays so to its neighbours."""
    least = math.inf
    for m in sorted(work.sampled, reverse=True):
        for _ in range(2):
            if m not in work.results and _best(work, m) > STALLED * least:
                work.times[m] = dict(measured(work, m, work.times[m])) or work.times[m]
        if m not in work.results and _best(work, m) > STALLED * least:
            log.info("%s: other work stalled all measurements of M = %d: its neighbours serve it", work.rows_class, m)
            work.sampled.remove(m)
            del work.times[m]
        else:
            least = min(least, _best(work, m))


def _best(work: Work, m: int) -> float:
    return min(work.right(m).values(), default=math.inf)


def _look_back(work: Work) -> None:
    """Measure the best choice of each sampled M at the M before it, too: it may have been found only later."""
    for above, m in itertools.pairwise(sorted(work.sampled, reverse=True)):
        best, best_above = (min(work.right(x), key=work.right(x).__getitem__, default="") for x in (m, above))
        if best and best_above and isinstance(work.at(best_above, m), Choice):
            complete(m, (best, best_above), work.times, lambda m, names: measured(work, m, names))


def _entrants(work: Work, m: int, ready: Iterable[Choice]) -> list[str]:
    """Return the names that compete at an M that is not fully tuned: its neighbours' best legal ones, and those in ``ready``."""
    found = [work.baseline] if work.baseline else []
    lower, tuned = max(x for x in work.sampled if x < m), max(x for x in work.results if x < m)
    for neighbour in dict.fromkeys((lower, tuned, min((x for x in work.sampled if x > m), default=tuned))):
        times = work.right(neighbour)
        legal = (name for name in sorted(times, key=times.__getitem__) if isinstance(work.at(name, m), Choice))
        found += itertools.islice(legal, MOST_OF_NEIGHBOUR)
    found += [work.take(m, choice) for choice in ready]
    return list(dict.fromkeys(found))


def _tune(work: Work, sampled: Sequence[int], *, limits: bool, retry: Retry) -> None:
    on_cpu = work.device.type == "cpu"
    if not on_cpu and work.settings.tune_in_subprocess:
        prepare_measuring(work.device, work.settings)
    candidates = {m: work.candidates(m) for m in sampled}
    missing = [] if on_cpu else [c for each in candidates.values() for c in each.stored(work.store, retry=retry).missing]
    with Compilation(missing, work.settings) if work.siblings is None else work.siblings.compiling(missing) as compilation:
        if limits and work.limits is not None:
            work.limits.ensure(work.rows_class.problem, work.progress)
        for m, each in candidates.items():
            work.progress.begin(each.problem, len(sampled))
            found, result = select(each, work.progress, compilation, retry=retry, limits=work.limits)
            work.progress.end(result)
            work.results[m] = result
            work.sampled.append(m)
            if found.picked is None:
                raise without_pick(result, work.settings)
            _take(work, m, found, result)
    _warn_if_busy(work)
    if work.siblings is not None:
        work.siblings.learn(work.results.values())


def _warn_if_busy(work: Work) -> None:
    """Warn once of all tuned Ms that were measured on a busy machine."""
    seen = {m: result.disturbed_now for m, result in work.results.items() if result.disturbed_now}
    if seen:
        busy = f"{len(seen)} of {len(work.results)} tuned Ms ({', '.join(map(str, seen))}) were measured {BUSY_MARK}"
        log.warning("%s: %s (%s): %s", work.rows_class, busy, next(iter(seen.values())), AGAIN)


def _take(work: Work, m: int, candidates: Candidates, result: ProblemResult) -> None:
    """Record the times of an M's finalists, or of its only choice. A class is selected from all correct choices."""
    right = [o for o in result.outcomes if o.status is Status.OK]
    finalists = [o for o in right if o.finalist] or right[:1]
    for outcome in right if work.settings.batch_invariant else finalists:
        # Torch's own operation may have a different name at each M. ``baseline`` identifies it.
        name = work.take(m, candidates.choices[outcome.content_hash])
        work.rough.setdefault(m, {})[name] = outcome.time_us or 0.0
        if outcome in finalists:
            work.times.setdefault(m, {})[name] = outcome.time_us or 0.0


def _table(work: Work) -> Table:
    """Return the table by times, with each choice legal and proved over its intervals."""
    return proved(work, lambda: legal_segments(work, segments_by_time(work)))


def proved(
    work: Work,
    intervals: Callable[[], Sequence[Segment]],
    rows_of: Callable[[Segment, random.Random], tuple[int, ...]] | None = None,
    part: RowClass | None = None,
) -> Table:
    """Return the table of ``intervals``, with each choice proved at ``rows_of``. Exclude wrong choices, and repeat.

    ``part`` is the class with fewer columns in whose place the choices are verified.
    """
    rows_of = rows_of or (lambda x, generator: rows_to_check(x, work.rows_class, tile_rows(work.choices[x.name]), generator))
    while True:
        segments = [with_kernels(work, x) for x in intervals()]
        if not segments:
            raise NoValidChoicesError(str(work.rows_class), [(name, "wrong", reason) for name, reason in work.wrong.items()])
        generator = random.Random(SEED)
        checked = [rows_of(x, generator) for x in segments]
        jobs = [(work.choices[x.name], rows) for x, rows in zip(segments, checked, strict=True)]
        work.progress.stage("prove", 0, len(jobs))
        work.close()
        failed = uncompiled(work, segments) or failures_of(jobs, part or work.rows_class, work.device, work.settings)
        work.progress.stage("prove", len(jobs), len(jobs))
        if not failed:
            proved = (dataclasses.replace(x, checked=rows) for x, rows in zip(segments, checked, strict=True))
            return Table(segments=merged(proved), seed=SEED)
        for name, reason in failed.items():
            log.warning("%s: excluding %s, which fails for %s", work.rows_class, name, reason)
            if work.choices[name].baseline:
                raise NoValidChoicesError(f"{work.rows_class} with M in {work.rows[0]}..{work.rows[-1]}", [(name, "wrong", reason)])
        work.wrong |= failed
