"""A gate's result as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..selector.table import new_table
from .result import GateResult
from .statistics import Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["renderables", "summary", "warnings"]

STYLES = {Verdict.REGRESSED: "bold red", Verdict.INCONCLUSIVE: "yellow", Verdict.IMPROVED: "green", Verdict.PASS: None}


def renderables(result: GateResult) -> Iterator[RenderableType]:
    """The table, what is to be said of single problems, and the summary, as parts that a rich console prints."""
    from rich.text import Text  # noqa: PLC0415 - rich takes longer to import than this package

    yield Text(f"device: {result.device}; anchor: {_anchor(result)}")
    yield _table(result)
    for line in _remarks(result):
        yield Text(line, style="dim")
    yield Text(summary(result), style="bold")


def summary(result: GateResult) -> str:
    """``PASS: 4 problems, 3 PASS, 1 IMPROVED; slower than torch by at most 2%, 7 processes in a batch``"""
    verdicts = [e.judgement.verdict for e in result.entries if e.judgement]
    counts = [f"{verdicts.count(v)} {v}" for v in Verdict if v in verdicts]
    counts += [f"{len(result.failed)} could not be measured"] if result.failed else []
    problems = f"{len(result.entries)} problem{'s' * (len(result.entries) != 1)}"
    return (
        f"{result.verdict}: {problems}, {', '.join(counts)}; the limit is {100 * (result.rule.limit - 1):.0f}% slower than "
        f"{_anchor(result)}, with {result.options.processes} processes in a batch"
    )


def warnings(result: GateResult) -> list[str]:
    """What a person must not overlook though the exit status may be 0."""
    lines = []
    if open_ := [e for e in result.entries if e.judgement and e.judgement.verdict is Verdict.INCONCLUSIVE]:
        lines.append(f"INCONCLUSIVE: {len(open_)} of {len(result.entries)} problems were NOT judged; the reasons are above")
    if result.missing and result.options.require_baseline:
        lines.append(f"{len(result.missing)} required baselines are missing from {result.baselines_file}")
    return lines


def _anchor(result: GateResult) -> str:
    return "torch" if result.options.anchor == "torch" else f"the baseline in {result.baselines_file}"


def _table(result: GateResult) -> Table:
    from rich.text import Text  # noqa: PLC0415 - see renderables

    with_baseline = result.options.anchor == "baseline"
    numbers = ("µs", "torch µs", "ratio", *(("baseline", "change") if with_baseline else ()), "±")
    table = new_table(texts=("problem", "choice"), numbers=numbers, last="verdict")
    for entry in result.entries:
        bounds = entry.judgement.bounds if entry.judgement else None
        cells = [
            str(entry.problem),
            entry.candidate or "–",
            _number(entry.candidate_us, ".1f"),
            _number(entry.anchor_us, ".1f"),
            _number(entry.ratio, ".3f"),
        ]
        if with_baseline:
            before = entry.baseline.ratio if entry.baseline else None
            cells += [_number(before, ".3f"), _number(entry.change, ".3f")]
        cells += [
            f"{100 * bounds.margin:.1f}%" if bounds else "–",
            str(entry.judgement.verdict) if entry.judgement else "not measured",
        ]
        table.add_row(*map(Text, cells), style=STYLES[entry.judgement.verdict] if entry.judgement else "bold red")
    return table


def _remarks(result: GateResult) -> Iterator[str]:
    """What is to be said of single problems; what holds for several is said once."""
    said: dict[str, list[str]] = {}
    for entry in result.entries:
        reason = entry.judgement.reason if entry.judgement else entry.series.failure
        for line in (*([reason] if reason else []), *entry.notes):
            said.setdefault(line, []).append(str(entry.problem))
    for line, problems in said.items():
        yield f"{problems[0] if len(problems) == 1 else f'{len(problems)} problems'}: {line}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
