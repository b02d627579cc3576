"""Results of a gate, as values that convert to JSON, and their report."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..problem import Problem
from ..selector.text_table import TextTable, counted
from .baselines import Baseline
from .options import GateOptions
from .sampling import Series
from .statistics import Decision, Judgement, Rule

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(slots=True, kw_only=True)
class ProblemGate:
    """Result of one problem. ``judgement`` is None if it could not be measured, with the reason in ``series.failure``."""

    problem: Problem
    candidate: str = ""
    """Name of the judged choice."""
    reference: str = ""
    series: Series = field(default_factory=lambda: Series([]))
    judgement: Judgement | None = None
    baseline: Baseline | None = None
    notes: list[str] = field(default_factory=list)
    missing: bool = False
    """True if the problem has no baseline although one is needed."""
    written: bool = False
    """True if its ratio became the new baseline."""

    @property
    def candidate_us(self) -> float | None:
        """Median time of a call of the candidate over the processes."""
        return statistics.median(s.candidate_us for s in self.series.samples) if self.series.samples else None

    @property
    def reference_us(self) -> float | None:
        """Median time of a call of the reference over the processes."""
        return statistics.median(s.reference_us for s in self.series.samples) if self.series.samples else None

    @property
    def ratio(self) -> float | None:
        """Time of the candidate divided by the reference's: the geometric mean over the processes."""
        values = [s.log_ratio for s in self.series.samples]
        return math.exp(statistics.fmean(values)) if values else None

    @property
    def change(self) -> float | None:
        """Judged ratio: ``ratio``, divided by the baseline's if that is the reference."""
        bounds = self.judgement.bounds if self.judgement else None
        return math.exp(bounds.log_ratio) if bounds else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with the log ratio of every process."""
        bounds = self.judgement.bounds if self.judgement else None
        return {
            "problem": {"text": str(self.problem)} | self.problem.to_json(),
            "candidate": self.candidate,
            "reference": self.reference,
            "verdict": self.judgement.decision.value if self.judgement else None,
            "reason": self.judgement.reason if self.judgement else self.series.failure,
            "candidate_us": self.candidate_us,
            "reference_us": self.reference_us,
            "ratio": self.ratio,
            "judged": {"ratio": self.change, "lower": math.exp(bounds.lower), "upper": math.exp(bounds.upper)} if bounds else None,
            "baseline": {"ratio": self.baseline.ratio, "pick": self.baseline.pick} if self.baseline else None,
            "notes": self.notes,
            "log_ratios": self.series.values,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """Results of all problems of a gate."""

    entries: list[ProblemGate]
    options: GateOptions
    rule: Rule
    device: str
    versions: Mapping[str, str]
    baselines_file: str = ""
    """File from which baselines were read or to which they were written. Empty without any."""

    @property
    def decision(self) -> Decision:
        """Decision of the suite: the first in ``Decision``'s order that any problem has. Unmeasured problems are INCONCLUSIVE."""
        found = {e.judgement.decision if e.judgement else Decision.INCONCLUSIVE for e in self.entries}
        return next(decision for decision in Decision if decision in found)

    @property
    def failed(self) -> list[ProblemGate]:
        """Problems that could not be measured."""
        return [e for e in self.entries if e.judgement is None]

    @property
    def missing(self) -> list[ProblemGate]:
        """Problems without the needed baseline."""
        return [e for e in self.entries if e.missing]

    @property
    def exit_status(self) -> int:
        """1 for a regression or a missing required baseline, else 2 if a problem could not be measured.

        Else 3 if no problem was judged, or with ``strict`` if one was not. Else 0. A run that updates baselines has to write them
        instead.
        """
        if self.decision is Decision.REGRESSED or (self.options.require_baseline and self.missing):
            return 1
        if self.failed:
            return 2
        judged = [e.judgement is not None and e.judgement.decision is not Decision.INCONCLUSIVE for e in self.entries]
        done = [e.written for e in self.entries] if self.options.update_baseline else judged
        return 0 if (all(done) if self.options.strict else any(done)) else 3

    def to_json(self) -> dict[str, Any]:
        """Return plain values: the options, the rule, every problem."""
        return {
            "verdict": self.decision.value,
            "reference": self.options.reference,
            "candidate": self.options.candidate,
            "device": self.device,
            "versions": dict(self.versions),
            "rule": dataclasses.asdict(self.rule) | {"processes": self.options.processes},
            "problems": [entry.to_json() for entry in self.entries],
        }


STYLES = {Decision.REGRESSED: "bold red", Decision.INCONCLUSIVE: "yellow", Decision.IMPROVED: "green", Decision.PASS: None}


def renderables(result: GateResult) -> Iterator[RenderableType]:
    """Yield the report in parts for a rich console: the table, remarks on single problems, the summary."""
    from rich.text import Text  # noqa: PLC0415 - rich takes longer to import than this package

    yield Text(f"device: {result.device}; reference: {_reference(result)}")
    yield _table(result)
    said: dict[str, list[str]] = {}
    for entry in result.entries:
        reason = entry.judgement.reason if entry.judgement else entry.series.failure
        for line in (*([reason] if reason else []), *entry.notes):
            said.setdefault(line, []).append(str(entry.problem))
    for line, problems in said.items():  # print a remark on several problems once
        yield Text(f"{problems[0] if len(problems) == 1 else f'{len(problems)} problems'}: {line}", style="dim")
    yield Text(summary(result), style="bold")


def summary(result: GateResult) -> str:
    """Return a line such as ``PASS: 4 problems, 3 PASS, 1 IMPROVED; the limit is 2% slower than torch, …``."""
    decisions = [e.judgement.decision for e in result.entries if e.judgement]
    counts = [f"{decisions.count(v)} {v}" for v in Decision if v in decisions]
    counts += [f"{len(result.failed)} could not be measured"] if result.failed else []
    return (
        f"{result.decision}: {counted(len(result.entries), 'problem')}, {', '.join(counts)}; "
        f"the limit is {result.options.limit:g}% slower than "
        f"{_reference(result)}, with {result.options.processes} processes in a batch"
    )


def warnings(result: GateResult) -> list[str]:
    """Return warnings, which matter even with exit status 0."""
    lines = []
    if open_ := [e for e in result.entries if e.judgement and e.judgement.decision is Decision.INCONCLUSIVE]:
        lines.append(f"INCONCLUSIVE: {len(open_)} of {len(result.entries)} problems were NOT judged; the reasons are above")
    if result.missing and result.options.require_baseline:
        lines.append(f"{counted(len(result.missing), 'required baseline')} missing from {result.baselines_file}")
    return lines


def _reference(result: GateResult) -> str:
    return "torch" if result.options.reference == "torch" else f"the baseline in {result.baselines_file}"


def _table(result: GateResult) -> TextTable:
    from rich.text import Text  # noqa: PLC0415 - see renderables

    with_baseline = result.options.reference == "baseline"
    numbers = ("µs", "torch µs", "ratio", *(("baseline", "change") if with_baseline else ()), "±")
    table = TextTable(texts=("problem", "choice"), numbers=numbers, last="verdict", optional=("torch µs", "µs"))
    for entry in result.entries:
        bounds = entry.judgement.bounds if entry.judgement else None
        cells = [
            str(entry.problem),
            entry.candidate or "–",
            _number(entry.candidate_us, ".1f"),
            _number(entry.reference_us, ".1f"),
            _number(entry.ratio, ".3f"),
        ]
        if with_baseline:
            before = entry.baseline.ratio if entry.baseline else None
            cells += [_number(before, ".3f"), _number(entry.change, ".3f")]
        cells += [
            f"{100 * bounds.margin:.1f}%" if bounds else "–",
            str(entry.judgement.decision) if entry.judgement else "not measured",
        ]
        table.add_row(*map(Text, cells), style=STYLES[entry.judgement.decision] if entry.judgement else "bold red")
    return table


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
