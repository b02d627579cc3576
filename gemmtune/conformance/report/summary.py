"""The findings of a run as data: a verdict for each property, failures grouped by what they look like, an exit status."""

from __future__ import annotations

import dataclasses
import functools
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

import torch

from ...version import __version__
from ..bench.outcome import Failure, Record, Verdict
from ..cases.case import Case
from ..diagnose import kind_of
from ..properties.table import PROPERTIES
from ..runs.run import PAST_TIME, Run

TILES = (16, 32, 64, 128)
"""Sizes of tiles in which the place of a wrong element is given."""
_SORTS = {Verdict.CRASHED: "the process died", Verdict.TIMED_OUT: "no answer in time", Verdict.RAISED: "an error is raised"}
UNKNOWN = "wrong values like no known bug"
UNEXAMINED = "wrong as well, not examined further"
NOT_ASKED = "not asked for"


class Standing(StrEnum):
    """The verdict on a property, or on all of them."""

    CONFORMS = "CONFORMS"
    FAILS = "FAILS"
    NOT_TESTED = "NOT TESTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class PropertySummary:
    """One property: how many of its cases were executed, refused by the GEMM, and not run; ``failed`` are those that violate it,
    among them cases of other properties that came upon it."""

    name: str
    meaning: str
    standing: Standing
    reason: str = ""
    """Why it was not tested."""
    executed: int = 0
    failed: int = 0
    known: int = 0
    """Failures that are listed as known."""
    refused: int = 0
    skipped: int = 0
    """Not run: listed as such, or after too many crashes."""
    error_over_bound: float | None = None
    """The largest of all its cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Failures that look alike, whatever the property, the smallest case first."""

    looks_like: str
    found: tuple[tuple[Record, Failure], ...]

    @property
    def cases(self) -> int:
        """How many cases fail in this way."""
        return len({record.case for record, _ in self.found})

    @property
    def by_property(self) -> dict[str, int]:
        """How many of them violate each property."""
        return dict(Counter(failure.property_name for _, failure in self.found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All that a run found. ``complaints`` count against the run, ``warnings`` do not."""

    run: Run
    properties: tuple[PropertySummary, ...]
    groups: tuple[FailureGroup, ...]
    records: tuple[Record, ...]
    complaints: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    sanitized: int = 0
    """Runs of cases under compute-sanitizer that computed something."""
    interrupted: bool = False

    @property
    def executed(self) -> int:
        """Cases in which the GEMM was called and did not refuse."""
        return sum(map(attrgetter("executed"), self.records))

    @property
    def refused(self) -> int:
        """Cases that the GEMM refused."""
        return sum(map(attrgetter("refused"), self.records))

    @property
    def failed(self) -> int:
        """Cases that failed and are not known to."""
        return sum(map(attrgetter("failed"), self.records))

    @property
    def choices(self) -> dict[str, int]:
        """Numbers of cases in which each choice ran, where the GEMM says what did; the most frequent first."""
        return dict(Counter(r.outcome.choice for r in self.records if r.executed and r.outcome and r.outcome.choice).most_common())

    @property
    def not_run(self) -> int:
        """Cases that were not run: listed as such, after too many crashes, or past the time."""
        return sum(record.outcome is None for record in self.records)

    @property
    def late(self) -> int:
        """Cases that were not run because the time was over."""
        return sum(record.outcome is None and record.reason.startswith(PAST_TIME) for record in self.records)

    @property
    def sampled(self) -> bool:
        """A sample was asked for, and was not all that there is."""
        return self.run.options.sampled and (self.late > 0 or len(self.run.cases()) < len(self.run.everything))

    @property
    def standing(self) -> Standing:
        """The verdict. Where nothing ran, or nothing failed before an interruption, there is none."""
        if not (self.executed or self.sanitized) or (self.interrupted and not self.failed):
            return Standing.NOT_TESTED
        return Standing.FAILS if self.failed or self.complaints else Standing.CONFORMS

    @property
    def exit_status(self) -> int:
        """0 conforming, 1 not, 2 not tested."""
        return {Standing.CONFORMS: 0, Standing.FAILS: 1, Standing.NOT_TESTED: 2}[self.standing]

    @property
    def untested(self) -> tuple[PropertySummary, ...]:
        """The properties that were not tested."""
        return tuple(p for p in self.properties if p.standing is Standing.NOT_TESTED)


def summarise(
    run: Run,
    records: Sequence[Record],
    *,
    narrowed: bool,
    seconds: float,
    complaints: Iterable[str] = (),
    notes: Iterable[str] = (),
    sanitized: int = 0,
    interrupted: bool = False,
) -> Summary:
    """Sum up what became of the cases of a run. ``narrowed``: something other than its options took only a part of the cases."""
    order = {p.name: i for i, p in enumerate(PROPERTIES)}
    records = tuple(sorted(records, key=lambda r: (order.get(r.case.property_name, len(order)), r.drawn, _size(r.case))))
    stale = run.stale_lines({record.case.id for record in records}) if not interrupted else []
    surprises = [f"{r.case.id} is listed as known to fail ({r.known}), but passes: remove the line" for r in records if r.surprise]
    executed = sum(record.executed for record in records)
    least = run.least_executed(narrowed=narrowed or interrupted)
    few = [f"only {executed} cases were executed, expected at least {least} (min_executed)"] if 0 < executed < least else []
    properties = tuple(_property_summaries(run, records, narrowed=narrowed or interrupted))
    summary = Summary(
        run=run,
        properties=properties,
        groups=tuple(_groups(records)),
        records=records,
        complaints=(*complaints, *surprises, *few, *(stale if run.lists_are_strict else [])),
        warnings=() if run.lists_are_strict else tuple(stale),
        notes=tuple(notes),
        seconds=seconds,
        sanitized=sanitized,
        interrupted=interrupted,
    )
    if not summary.sampled:
        return summary
    over = f", of which {summary.late} were not run in time ({run.options.max_seconds:g} s)" if summary.late else ""
    note = f"sampled {len(run.cases())} of {len(run.everything)} cases, seed {run.options.seed or 0}{over}"
    return dataclasses.replace(summary, notes=(*summary.notes, note))


def tile_places(index: tuple[int, ...]) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
    """The (row, column) of the tile that has an element, and the element's place in it, for each size of ``TILES``."""
    row, col = index[-2:]
    return {tile: ((row // tile, col // tile), (row % tile, col % tile)) for tile in TILES}


@functools.cache
def versions() -> dict[str, str]:
    """What the result depends on besides the GEMM and the device."""
    found = {"gemmtune": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    return found | ({"CUDA": torch.version.cuda} if torch.version.cuda else {})


def _size(case: Case) -> int:
    return max(case.batch, 1) * case.m * case.n * case.k


def _violations(record: Record) -> dict[str, Failure]:
    """The first failure of each property that a failed case violates."""
    found: dict[str, Failure] = {}
    for failure in record.outcome.failures if record.outcome is not None and record.bad else ():
        found.setdefault(failure.property_name, failure)
    return found


def _property_summaries(run: Run, records: Sequence[Record], *, narrowed: bool) -> Iterator[PropertySummary]:
    violated: dict[str, list[Record]] = {}
    for record in records:
        for name in _violations(record):
            violated.setdefault(name, []).append(record)
    known = {p.name: p.meaning for p in PROPERTIES}
    for name in dict.fromkeys((*known, *violated)):
        own = [record for record in records if record.case.property_name == name and not record.sanitized]
        against = violated.get(name, [])
        executed, failed = sum(r.executed for r in own), sum(r.failed for r in against)
        errors = [r.outcome.error_over_bound for r in own if r.outcome and r.outcome.error_over_bound is not None]
        standing = Standing.FAILS if failed else Standing.CONFORMS if executed else Standing.NOT_TESTED
        yield PropertySummary(
            name=name,
            meaning=known.get(name, ""),
            standing=standing,
            reason=_why_not(run, name, own, narrowed=narrowed) if standing is Standing.NOT_TESTED else "",
            executed=executed,
            failed=failed,
            known=sum(r.known_failure for r in against),
            refused=sum(r.refused for r in own),
            skipped=sum(r.outcome is None for r in own),
            error_over_bound=max(errors, default=None),
        )


def _why_not(run: Run, name: str, own: Sequence[Record], *, narrowed: bool) -> str:
    refusals = [record.outcome for record in own if record.refused and record.outcome]
    if refusals:
        return f"nothing but refusals: {refusals[0].reason}"
    if own:
        return own[0].reason
    [wanted] = [p for p in PROPERTIES if p.name == name]
    if narrowed or run.options.repro or (run.options.properties and name not in run.options.properties):
        return NOT_ASKED
    if run.options.sampled and any(case.property_name == name for case in run.everything):
        return "no case of it is in the sample"
    return wanted.needs(run.scope) or "no case of this level fits what is declared and asked for"


def _groups(records: Sequence[Record]) -> list[FailureGroup]:
    """The fewest kinds that account for all failures: again and again the one that accounts for most of what is left.

    The kinds of a failure are what it looks like, then what would give it too.

    A case that is too small to tell two bugs apart thus goes to the one that other cases tell. A kind counts if some failure looks
    like it more than like any other.
    """
    left = [
        (record, failure, tuple(kind_of(text) for text in (_looks_like(record.outcome.verdict, failure), *failure.also)))
        for record in records
        if record.failed and record.outcome is not None
        for failure in _violations(record).values()
    ]
    groups: list[FailureGroup] = []
    while left:
        certain, support = Counter(kinds[0] for *_, kinds in left), Counter(kind for *_, kinds in left for kind in set(kinds))
        kind = max(certain, key=lambda name: (name not in (UNKNOWN, UNEXAMINED), support[name], certain[name]))
        same = [x for x in left if kind in x[2]]
        same.sort(key=lambda x: (x[2][0] != kind, _size(x[0].case)))
        left = [x for x in left if kind not in x[2]]
        first, failure, _ = same[0]
        verdict = first.outcome.verdict if first.outcome is not None else Verdict.FAILED
        groups.append(FailureGroup(looks_like=_looks_like(verdict, failure), found=tuple((r, f) for r, f, _ in same)))
    return sorted(groups, key=lambda group: (group.looks_like in (UNKNOWN, UNEXAMINED), -group.cases))


def _looks_like(verdict: Verdict, failure: Failure) -> str:
    """The diagnosis in a few words, what became of the process, or what else is known."""
    if failure.diagnosis or verdict in _SORTS:
        return failure.diagnosis or _SORTS[verdict]
    if not failure.examined:
        return UNEXAMINED
    return UNKNOWN if failure.index is not None else failure.message.splitlines()[0]
