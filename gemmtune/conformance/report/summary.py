"""Findings of a run as data: a standing for each property, failures grouped by their likely bug, an exit status."""

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
from ..bench.outcome import CaseStatus, Failure, Record, cut_short_by
from ..cases.case import Case
from ..diagnose import kind_of
from ..properties.table import PROPERTIES
from ..runs.run import OURS, PAST_TIME, Run
from .declared import refused_declarations

TILES = (16, 32, 64, 128)
"""Sizes of tiles in which a wrong element is located."""
_ENDS = {CaseStatus.CRASHED: "the process died", CaseStatus.TIMED_OUT: "no answer in time", CaseStatus.RAISED: "an error is raised"}
UNKNOWN = "wrong values like no known bug"
UNEXAMINED = "wrong as well, not examined further"
NOT_ASKED = "not asked for"


class Standing(StrEnum):
    """Standing of one property or on the whole run."""

    CONFORMS = "CONFORMS"
    FAILS = "FAILS"
    NOT_TESTED = "NOT TESTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class PropertySummary:
    """Results of one property. ``failed`` counts the cases that violate it, including cases of other properties."""

    name: str
    meaning: str
    standing: Standing
    reason: str = ""
    """Reason for not testing the property."""
    executed: int = 0
    failed: int = 0
    known: int = 0
    """Failures listed as known."""
    refused: int = 0
    cut_short: int = 0
    """Executed cases that a violation of another property ended, such as a result that cannot be compared."""
    skipped: int = 0
    """Cases that were not run: listed to be skipped, past the time limit, or after too many crashes."""
    error_over_bound: float | None = None
    """Largest error of the property's cases, as a fraction of the bound."""


def shown_counts(properties: Iterable[PropertySummary]) -> dict[str, str]:
    """Return the counts to show, as field and title: those that any property has, and always three."""
    always, properties = ("executed", "failed", "refused"), tuple(properties)
    counts = dict(zip(always, always, strict=True)) | {"known": "known", "cut_short": "cut short", "skipped": "not run"}
    return {name: title for name, title in counts.items() if name in always or any(getattr(p, name) for p in properties)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Failures with the same likely bug, across properties. The smallest case comes first."""

    looks_like: str
    found: tuple[tuple[Record, Failure], ...]

    @property
    def cases(self) -> int:
        """Number of cases that fail in this way."""
        return len({record.case for record, _ in self.found})

    @property
    def by_property(self) -> dict[str, int]:
        """Number of failures for each violated property."""
        return dict(Counter(failure.property_name for _, failure in self.found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything that a run found. ``complaints`` fail the run, ``warnings`` do not."""

    run: Run
    properties: tuple[PropertySummary, ...]
    groups: tuple[FailureGroup, ...]
    records: tuple[Record, ...]
    complaints: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    sanitized: int = 0
    """Case runs under compute-sanitizer that computed something."""
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
        """Cases that failed and are not listed as known failures."""
        return sum(map(attrgetter("failed"), self.records))

    @property
    def choices(self) -> dict[str, int]:
        """Number of cases for each choice that ran, if the GEMM reports it. The most frequent choice comes first."""
        return dict(Counter(r.outcome.choice for r in self.records if r.executed and r.outcome and r.outcome.choice).most_common())

    @property
    def not_run(self) -> int:
        """Cases that were not run: listed to be skipped, past the time limit, or after too many crashes."""
        return sum(record.outcome is None for record in self.records)

    @property
    def late(self) -> int:
        """Cases that were not run because the time was over."""
        return sum(record.outcome is None and record.reason.startswith(PAST_TIME) for record in self.records)

    @property
    def cases(self) -> int:
        """Cases that the run selected, and those that took the place of refused ones."""
        selected = set(self.run.cases())
        return len(selected | {record.case for record in self.records if not (record.drawn or record.sanitized)})

    @property
    def sampled(self) -> bool:
        """True if the run is a sample and some of the level's cases were not in it or not in time."""
        return self.run.options.sampled and (self.late > 0 or self.cases < len(self.run.everything))

    @property
    def standing(self) -> Standing:
        """Standing of the run: NOT TESTED if no property was tested, or if the run was interrupted before any failure."""
        if not (len(self.untested) < len(self.properties) or self.sanitized) or (self.interrupted and not self.failed):
            return Standing.NOT_TESTED
        return Standing.FAILS if self.failed or self.complaints else Standing.CONFORMS

    @property
    def exit_status(self) -> int:
        """Exit status: 0 conforms, 1 fails, 2 not tested."""
        return {Standing.CONFORMS: 0, Standing.FAILS: 1, Standing.NOT_TESTED: 2}[self.standing]

    @property
    def untested(self) -> tuple[PropertySummary, ...]:
        """Properties that were not tested."""
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
    """Summarise the records of a run. ``narrowed``: something other than its options selected a part of the cases."""
    order = {p.name: i for i, p in enumerate(PROPERTIES)}
    records = tuple(sorted(records, key=lambda r: (order.get(r.case.property_name, len(order)), r.drawn, _size(r.case))))
    stale = run.stale_lines({record.case.id for record in records}) if not interrupted else []
    surprises = [f"{r.case.id} is listed as known to fail ({r.known}), but passes: remove the line" for r in records if r.surprise]
    executed = sum(record.executed for record in records)
    least = run.least_executed(narrowed=narrowed or interrupted)
    few = [f"only {executed} cases were executed, expected at least {least} (min_executed)"] if 0 < executed < least else []
    unkept = () if run.options.spec.target.startswith(OURS) else refused_declarations(run.scope.traits, records)
    properties = tuple(_property_summaries(run, records, narrowed=narrowed or interrupted))
    summary = Summary(
        run=run,
        properties=properties,
        groups=tuple(_groups(records)),
        records=records,
        complaints=(*complaints, *unkept, *surprises, *few, *(stale if run.lists_are_strict else [])),
        warnings=() if run.lists_are_strict else tuple(stale),
        notes=tuple(notes),
        seconds=seconds,
        sanitized=sanitized,
        interrupted=interrupted,
    )
    if not summary.sampled:
        return summary
    within = f" in {run.options.max_seconds:g} s" if summary.late else ""
    note = f"sampled {summary.cases - summary.late} of {len(run.everything)} cases{within}, seed {run.options.seed or 0}"
    return dataclasses.replace(summary, notes=(*summary.notes, note))


def tile_places(index: tuple[int, ...]) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
    """Return, for each size of ``TILES``, the (row, column) of the element's tile and of the element within it."""
    row, col = index[-2:]
    return {tile: ((row // tile, col // tile), (row % tile, col % tile)) for tile in TILES}


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions that the result depends on, apart from the GEMM and the device."""
    found = {"gemmtune": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    return found | ({"CUDA": torch.version.cuda} if torch.version.cuda else {})


def _size(case: Case) -> int:
    return max(case.batch, 1) * case.m * case.n * case.k


def _violations(record: Record) -> dict[str, Failure]:
    """Return the first failure of each property that a failed case violates."""
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
        cut_short = sum(r.cut_short for r in own)
        standing = Standing.FAILS if failed else Standing.CONFORMS if executed > cut_short else Standing.NOT_TESTED
        yield PropertySummary(
            name=name,
            meaning=known.get(name, ""),
            standing=standing,
            reason=_why_not(run, name, own, narrowed=narrowed) if standing is Standing.NOT_TESTED else "",
            executed=executed,
            failed=failed,
            known=sum(r.known_failure for r in against),
            refused=sum(r.refused for r in own),
            cut_short=cut_short,
            skipped=sum(r.outcome is None for r in own),
            error_over_bound=max(errors, default=None),
        )


def _why_not(run: Run, name: str, own: Sequence[Record], *, narrowed: bool) -> str:
    refusals = [record.outcome for record in own if record.refused and record.outcome]
    if own:
        return cut_short_by(own) or (f"every case was refused: {refusals[0].reason}" if refusals else own[0].reason)
    [wanted] = [p for p in PROPERTIES if p.name == name]
    if narrowed or run.options.repro or (run.options.properties and name not in run.options.properties):
        return NOT_ASKED
    if run.options.sampled and any(case.property_name == name for case in run.everything):
        return "no case of it is in the sample"
    return wanted.needs(run.scope) or "no case of this level matches both the declarations and the options"


def _groups(records: Sequence[Record]) -> list[FailureGroup]:
    """Group the failures by bug, with as few bugs as possible.

    The candidates of a failure are its likely bug and the bugs that would give the same result (``also``). In each round, the bug
    that explains most of the remaining failures takes them all. A case too small to tell two bugs apart counts for the bug that
    larger cases identify. A bug can only be chosen if it is the likely bug of some failure.
    """
    remaining = [
        (record, failure, tuple(kind_of(text) for text in (_looks_like(record.outcome.status, failure), *failure.also)))
        for record in records
        if record.failed and record.outcome is not None
        for failure in _violations(record).values()
    ]
    groups: list[FailureGroup] = []
    while remaining:
        certain = Counter(kinds[0] for *_, kinds in remaining)
        support = Counter(kind for *_, kinds in remaining for kind in set(kinds))
        kind = max(certain, key=lambda name: (name not in (UNKNOWN, UNEXAMINED), support[name], certain[name]))
        same = [x for x in remaining if kind in x[2]]
        same.sort(key=lambda x: (x[2][0] != kind, _size(x[0].case)))
        remaining = [x for x in remaining if kind not in x[2]]
        first, failure, _ = same[0]
        status = first.outcome.status if first.outcome is not None else CaseStatus.FAILED
        groups.append(FailureGroup(looks_like=_looks_like(status, failure), found=tuple((r, f) for r, f, _ in same)))
    return sorted(groups, key=lambda group: (group.looks_like in (UNKNOWN, UNEXAMINED), -group.cases))


def _looks_like(status: CaseStatus, failure: Failure) -> str:
    """Return the diagnosis. Without one, return the fate of the process or the first line of the message."""
    if failure.diagnosis or status in _ENDS:
        return failure.diagnosis or _ENDS[status]
    if not failure.examined:
        return UNEXAMINED
    return UNKNOWN if failure.index is not None else failure.message.splitlines()[0]
