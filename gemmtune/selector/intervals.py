"""Intervals of a range of M: by the times at its samples, then made legal for every M and few enough."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

from ..errors import NoValidChoicesError
from ..timing.rounds import tie
from .crossover import MOST_SEGMENTS, assigned, find_crossover
from .proof import legal_runs
from .range_work import Work, measured, segment_of
from .segments import Segment, merged

MOST_REPLACEMENTS = 4
"""Number of choices checked for legality where the fastest is illegal."""


def segments_by_time(work: Work) -> list[Segment]:
    """Return the intervals by time alone, from the sampled Ms and the crossovers between them."""
    times = {m: right for m in sorted(work.sampled) if (right := work.right(m))}
    margin = tie(work.disturbed)
    names = assigned(times, work.baseline, margin)
    runs = [(name, [m for m, _ in run]) for name, run in itertools.groupby(names.items(), key=lambda item: item[1])]
    starts = [work.rows[0]]
    for i, ((first, before), (second, after)) in enumerate(itertools.pairwise(runs)):
        work.progress.stage("crossovers", i, len(runs) - 1)
        between = before[-1], after[0]
        pair, apart, baseline = (first, second), work.rows_class.apart, work.baseline
        starts.append(
            find_crossover(*between, pair, work.times, lambda m, names: measured(work, m, names), apart, baseline, margin)
        )
    ends = [*(start - 1 for start in starts[1:]), work.rows[-1]]
    return [segment_of(work, name, lo, hi) for (name, _), lo, hi in zip(runs, starts, ends, strict=True)]


def legal_segments(work: Work, segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments. Where a choice is illegal for some M, insert the next best legal one."""
    found: list[Segment] = []
    for x in segments:
        for rows, reason in legal_runs(work.choices[x.name], range(x.lo, x.hi + 1), work.rows_class, work.device):
            part = dataclasses.replace(x, lo=rows[0], hi=rows[-1])
            found.append(part if reason is None else segment_of(work, _replacement(work, rows), rows[0], rows[-1]))
    whole = list(merged(found))
    while len(whole) > MOST_SEGMENTS:
        whole = _fewer(work, whole)
    return whole


def _replacement(work: Work, rows: range, before: Iterable[str] = ()) -> str:
    """Return a choice legal for all of ``rows``: one of ``before``, else the fastest at the nearest sample, else torch's."""
    sampled = [m for m in work.times if work.right(m)] or work.results
    nearest = min(sampled, key=lambda m: abs(math.log(m / rows[0])))
    ranked = sorted(work.right(nearest).items(), key=lambda item: item[1])
    for name in (*before, *(name for name, _ in ranked[:MOST_REPLACEMENTS])):
        runs = legal_runs(work.choices[name], rows, work.rows_class, work.device)
        if all(reason is None for _, reason in runs):
            return name
    for name, choice in work.choices.items():
        if choice.baseline and name not in work.wrong:
            return name
    for name in [x for x in work.choices if x not in work.wrong] if work.settings.batch_invariant else ():
        if all(reason is None for _, reason in legal_runs(work.choices[name], rows, work.rows_class, work.device)):
            return name
    reason = f"none of them is legal for each M of {rows[0]}..{rows[-1]}"
    raise NoValidChoicesError(str(work.rows_class), [(name, "refused", reason) for name in work.choices])


def _fewer(work: Work, segments: list[Segment]) -> list[Segment]:
    """Merge the two neighbours with the least ratio of ends, under the choice of the longer, of the other, or any legal one."""
    place = min(range(len(segments) - 1), key=lambda i: (segments[i + 1].hi + 1) / segments[i].lo)
    x, y = segments[place : place + 2]
    longer_first = (x.name, y.name) if (x.hi + 1) / x.lo >= (y.hi + 1) / y.lo else (y.name, x.name)
    name = _replacement(work, range(x.lo, y.hi + 1), longer_first)
    return list(merged([*segments[:place], segment_of(work, name, x.lo, y.hi), *segments[place + 2 :]]))
