"""Tuning of a range of M: anchors, hand-overs between them, a proof over each interval, and the table that is remembered."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..choice import Choice, Status
from ..device import DeviceInfo
from ..effort import EFFORT
from ..errors import InvalidProblemError, NoValidChoicesError, StoreError
from ..filters import why_not_named
from ..problem.rows import RowClass
from ..settings import Settings
from ..store.store import Ranged, Store
from ..workers.locks import tuning_lock
from .candidates import Candidates
from .handover import MOST_SEGMENTS, anchors_of, assigned, complete, hand_over, spread
from .invariant import few_anchors, one_for_all
from .offers import enabled_backends
from .precompile import Compilation, precompile
from .progress import Progress
from .proof import failures_of, legal_runs, rows_to_check, tile_rows
from .range_result import RangeResult
from .range_work import SEED, Source, Work, measured, segment_of, uncompiled, with_kernels
from .remote import prepare_measuring
from .result import ProblemResult
from .segments import INVARIANT, TABLE, Segment, Table, merged
from .select import ensure_limits, select

log = logging.getLogger("gemmtune")

MOST_BESIDE = 3
"""So many of the best of an anchor compete at the next one that is not tuned."""
MOST_INSTEAD = 4
"""So many choices are asked whether they are legal where the fastest is not."""


def stored_table(rows_class: RowClass, machine: str, store: Store, kind: str = TABLE) -> tuple[Table, str] | None:
    """The table of a class that the store has, and when it was measured; None where there is none, or one that cannot be used."""
    fact = store.ranged(rows_class.key, machine).get(kind)
    if fact is None:
        return None
    try:
        return Table.of(fact), fact.measured_at
    except (StoreError, InvalidProblemError) as error:
        log.warning("%s: %s", rows_class, error)
        return None


def kind_of(settings: Settings) -> str:
    """The kind of table that the settings ask for."""
    return INVARIANT if settings.batch_invariant else TABLE


def tune_rows(
    rows_class: RowClass,
    rows: range,
    device: DeviceInfo,
    settings: Settings,
    store: Store,
    progress: Progress,
    *,
    host_us: float = 0.0,
    recorded: Sequence[int] = (),
    source: Source | None = None,
    kind: str | None = None,
    limits: bool = False,
) -> RangeResult:
    """The table of a class for a range of M: from the store if it has one that covers the range, with choices that are there yet,
    else measured and remembered.

    ``recorded`` are Ms that are tuned beside those of the grid. ``source`` has the choices for a problem, where these are not those
    of the settings, and the table is then kept as another ``kind``. With ``limits`` those of the machine are measured if the store
    has none. An interrupted tuning keeps what was measured at its anchors.

    Raises:
        InvalidProblemError: the class has none of the ``rows``.
        NoValidChoicesError: nothing is right at some anchor.
    """
    if not rows_class.within(rows):
        raise InvalidProblemError(f"m: got {rows[0]}..{rows[-1]}, none of which is an M of {rows_class}")
    begun = time.perf_counter()
    work = Work(rows_class, rows, device, settings, host_us, progress, source)

    def waiting() -> None:
        progress.message("another process tunes this range: waiting for it")

    kind = kind or kind_of(settings)
    with tuning_lock(settings, f"{kind} {rows_class.key}", work.fingerprint, waiting):
        known = stored_table(rows_class, work.fingerprint, store, kind) if settings.tune != "force" else None
        if known is not None and known[0].covers(filter(rows_class.has, rows)) and _serves(known[0], work, store):
            return RangeResult(rows_class=rows_class, table=known[0], seconds=time.perf_counter() - begun, source="store")
        with contextlib.closing(work):
            _tune_anchors(work, store, recorded, limits=limits)
            table = one_for_all(work) if settings.batch_invariant else _proved(work)
        store.put_ranged(Ranged(key=rows_class.key, fingerprint=work.fingerprint, kind=kind, value=table.to_json()))
    return _measured(work, table, time.perf_counter() - begun)


def _measured(work: Work, table: Table, seconds: float) -> RangeResult:
    return RangeResult(
        rows_class=work.rows_class,
        table=table,
        anchors=tuple(work.results.values()),
        times={m: work.right(m) for m in sorted(work.times)},
        wrong=work.wrong,
        seconds=seconds,
        source="measured",
    )


def _serves(table: Table, work: Work, store: Store) -> bool:
    """Whether the choices of a stored table are there yet, but for those that the settings leave out. What the cache folder lost of
    their kernels is compiled."""
    enabled, needed = enabled_backends(work.device, work.settings), []
    for x in table.segments:
        choice = work.found(x, store)
        if choice is not None:
            legal = (choice.at(work.rows_class.at(m), work.device) for m in x.kernels)
            needed += [at for at in legal if isinstance(at, Choice)]
        elif work.source is not None or (x.backend in enabled and why_not_named(x.name, x.backend, work.settings) is None):
            log.info("%s: %s of the stored table is of another version: the range is tuned again", work.rows_class, x.name)
            return False
    return not precompile(needed, work.settings)


def _tune_anchors(work: Work, store: Store, recorded: Sequence[int], *, limits: bool) -> None:
    """Tune anchors far apart as problems of their own; on a GPU all compile in the background while the first are measured. At the
    anchors between, what was among the best at the next ones on either side competes, with what is ready for that M.
    """
    anchors = anchors_of(work.rows, work.rows_class.has, recorded)
    narrow, invariant = work.rows_class.at(anchors[0]).widens_b, work.settings.batch_invariant
    tuned = few_anchors(anchors) if invariant else spread(anchors, EFFORT[work.settings.search].rows_apart, narrow)
    _tune(work, store, tuned, limits=limits)
    others = [m for m in anchors if m not in tuned] if len(work.choices) > 1 and not invariant else []
    for i, (m, ready) in enumerate(zip(others, _ready_ahead(work, others), strict=True)):
        work.progress.stage("anchors between", i, len(others))
        times = measured(work, m, _entrants(work, m, ready))
        if times:
            work.times[m] = dict(times)
            work.anchors.append(m)
    if others:
        _look_back(work)
        work.progress.stage("anchors between", len(others), len(others))


def _look_back(work: Work) -> None:
    """Measure what is the best at an anchor at the one before, too: it may have been found only there."""
    for above, m in itertools.pairwise(sorted(work.anchors, reverse=True)):
        best, best_above = (min(work.right(x), key=work.right(x).__getitem__, default="") for x in (m, above))
        if best and best_above and isinstance(work.at(best_above, m), Choice):
            complete(m, (best, best_above), work.times, lambda m, names: measured(work, m, names))


def _ready_ahead(work: Work, rows: Sequence[int]) -> Iterator[list[Choice]]:
    """What is ready for each M: looked up in a thread while a GPU measures the one before; on a CPU that would disturb it."""
    if work.device.type == "cpu":
        yield from map(work.ready, rows)
    else:
        with ThreadPoolExecutor(1, thread_name_prefix="gemmtune-ready") as executor:
            yield from executor.map(work.ready, rows)


def _entrants(work: Work, m: int, ready: Iterable[Choice]) -> list[str]:
    """What competes at an anchor that is not tuned: the best of the next ones, on either side, as far as it is legal, and what is
    ``ready`` for it.
    """
    found = [work.baseline] if work.baseline else []
    lower, tuned = max(x for x in work.anchors if x < m), max(x for x in work.results if x < m)
    for beside in dict.fromkeys((lower, tuned, min((x for x in work.anchors if x > m), default=tuned))):
        times = work.right(beside)
        legal = (name for name in sorted(times, key=times.__getitem__) if isinstance(work.at(name, m), Choice))
        found += itertools.islice(legal, MOST_BESIDE)
    found += [work.take(m, choice) for choice in ready]
    return list(dict.fromkeys(found))


def _tune(work: Work, store: Store, anchors: Sequence[int], *, limits: bool) -> None:
    on_cpu = work.device.type == "cpu"
    if not on_cpu and work.settings.tune_in_subprocess:
        prepare_measuring(work.device, work.settings)
    candidates = {m: work.candidates(m) for m in anchors}
    missing = [c for each in candidates.values() for c in each.stored(store, reliable=True).missing]
    with Compilation(() if on_cpu else missing, work.settings) as compilation:
        if limits:
            ensure_limits(work.rows_class.problem, work.device, work.settings, store, work.progress)
        for m, each in candidates.items():
            work.progress.begin(each.problem, len(anchors))
            picked, result = select(each, store, work.progress, compilation, reliable=True)
            work.progress.end(result)
            work.results[m] = result
            work.anchors.append(m)
            if picked is None:
                left_out = [(o.name, str(o.status), o.reason) for o in result.outcomes]
                raise NoValidChoicesError(str(result.problem), left_out)
            _take(work, m, each.stored(store), result)


def _take(work: Work, m: int, candidates: Candidates, result: ProblemResult) -> None:
    """Note what was found at an anchor: the times of its finalists, or of its only choice."""
    finalists = [o for o in result.outcomes if o.finalist] or [o for o in result.outcomes if o.status is Status.OK][:1]
    for outcome in finalists:
        choice = candidates.choices[outcome.content_hash]
        name = outcome.name
        # Torch's own operation is known by being that: its name may be another one for another M.
        work.choices.setdefault(name, choice)
        work.anchor_of.setdefault(name, m)
        work.times.setdefault(m, {})[name] = outcome.time_us or 0.0


def _proved(work: Work) -> Table:
    """The table, each choice proved over its intervals; what is wrong somewhere is left out, and the rest done again."""
    while True:
        segments = [with_kernels(work, x) for x in _legal(work, _segments(work))]
        generator = random.Random(SEED)
        checked = [rows_to_check(x, work.rows_class, tile_rows(work.choices[x.name]), generator) for x in segments]
        asked = [(work.choices[x.name], rows) for x, rows in zip(segments, checked, strict=True)]
        work.progress.stage("prove", 0, len(asked))
        work.close()
        failed = uncompiled(work, segments) or failures_of(asked, work.rows_class, work.device, work.settings)
        work.progress.stage("prove", len(asked), len(asked))
        if not failed:
            proved = (dataclasses.replace(x, checked=rows) for x, rows in zip(segments, checked, strict=True))
            return Table(segments=merged(proved), seed=SEED)
        for name, reason in failed.items():
            log.warning("%s: %s is left out: it is wrong for %s", work.rows_class, name, reason)
            if work.choices[name].baseline:
                raise NoValidChoicesError(f"{work.rows_class} with M in {work.rows[0]}..{work.rows[-1]}", [(name, "wrong", reason)])
        work.wrong |= failed


def _segments(work: Work) -> list[Segment]:
    """The intervals by time alone: by what is known of the anchors, and of those between which a hand-over lies."""
    times = {m: right for m in sorted(work.anchors) if (right := work.right(m))}
    names = assigned(times, work.baseline)
    runs = [(name, [m for m, _ in run]) for name, run in itertools.groupby(names.items(), key=lambda item: item[1])]
    starts = [work.rows[0]]
    for i, ((first, before), (second, after)) in enumerate(itertools.pairwise(runs)):
        work.progress.stage("hand-overs", i, len(runs) - 1)
        between = before[-1], after[0]
        pair, apart = (first, second), work.rows_class.apart
        starts.append(hand_over(*between, pair, work.times, lambda m, names: measured(work, m, names), apart, work.baseline))
    ends = [*(start - 1 for start in starts[1:]), work.rows[-1]]
    return [segment_of(work, name, lo, hi) for (name, _), lo, hi in zip(runs, starts, ends, strict=True)]


def _legal(work: Work, segments: Sequence[Segment]) -> list[Segment]:
    """The segments, and where a choice is not legal for some M in between, the next best that is."""
    found: list[Segment] = []
    for x in segments:
        for rows, reason in legal_runs(work.choices[x.name], range(x.lo, x.hi + 1), work.rows_class, work.device):
            part = dataclasses.replace(x, lo=rows[0], hi=rows[-1])
            found.append(part if reason is None else segment_of(work, _instead(work, rows), rows[0], rows[-1]))
    whole = list(merged(found))
    while len(whole) > MOST_SEGMENTS:
        whole = _fewer(work, whole)
    return whole


def _instead(work: Work, rows: range, before: Iterable[str] = ()) -> str:
    """What is legal for all of ``rows``: of ``before``, else the fastest by the nearest anchor; at worst torch's own operation."""
    nearest = min(work.results, key=lambda m: abs(math.log(m / rows[0])))
    ranked = sorted(work.right(nearest).items(), key=lambda item: item[1])
    for name in (*before, *(name for name, _ in ranked[:MOST_INSTEAD])):
        runs = legal_runs(work.choices[name], rows, work.rows_class, work.device)
        if all(reason is None for _, reason in runs):
            return name
    for name, choice in work.choices.items():
        if choice.baseline and name not in work.wrong:
            return name
    reason = f"none of them is legal for each M of {rows[0]}..{rows[-1]}"
    raise NoValidChoicesError(str(work.rows_class), [(name, "refused", reason) for name in work.choices])


def _fewer(work: Work, segments: list[Segment]) -> list[Segment]:
    """The segments with two neighbours as one, those of the least ratio of ends: the choice of either, or whatever is legal."""
    place = min(range(len(segments) - 1), key=lambda i: (segments[i + 1].hi + 1) / segments[i].lo)
    x, y = segments[place : place + 2]
    longer_first = (x.name, y.name) if (x.hi + 1) / x.lo >= (y.hi + 1) / y.lo else (y.name, x.name)
    name = _instead(work, range(x.lo, y.hi + 1), longer_first)
    return list(merged([*segments[:place], segment_of(work, name, x.lo, y.hi), *segments[place + 2 :]]))
