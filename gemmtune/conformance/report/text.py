"""A run as text for a terminal or an HTML page: the GEMM, standings, failures, next steps."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...declaration.traits import Traits
from ...selector.text_table import TextTable
from ..bench.outcome import HeatMap
from ..options import RunOptions
from ..runs.files import command, pytest_command
from ..runs.isolation import Ground
from .summary import NOT_ASKED, FailureGroup, PropertySummary, Standing, Summary, tile_places, versions

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

MOST_GROUPS = 12
MOST_REASON = 160
MOST_LINES = 22
PAGE_GROUPS = 60
PAGE_IDS = 40
"""Further cases listed below the first one of a group."""
PAGE_WIDTH = 180
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>TITLE</title>
<style>
html {{ background: #ffffff; color: #1b1f24; }}
@media (prefers-color-scheme: dark) {{ html {{ filter: invert(0.9) hue-rotate(180deg); }} }}
pre {{ font: 13px/1.45 ui-monospace, monospace; overflow-x: auto; padding: 1rem; }}
{stylesheet}
</style>
</head>
<body><pre>{code}</pre></body>
</html>
"""
SHADES = {1.0: "right", 4.0: "up to 4 times the tolerance", 64.0: "up to 64 times", 1e4: "up to 10,000 times", math.inf: "more"}
"""Upper limit of |got − expected| ÷ tolerance for each shade. NaN and infinity have a shade of their own."""
COLOURS = ("#e4e8ee", "#f8d477", "#f0953f", "#d9482b", "#8f1616", "#6a1fb1")
_STYLES = {Standing.CONFORMS: "green", Standing.FAILS: "bold red", Standing.NOT_TESTED: "dim"}


def header_lines(options: RunOptions, ground: Ground) -> list[str]:
    """Return the lines that name the GEMM, device, level, versions and declarations."""
    sm = f" (SM{ground.sm})" if ground.sm else ""
    return [
        f"GEMM      {ground.name}",
        f"device    {ground.device_name}{sm}",
        f"level     {options.level}",
        f"versions  {', '.join(f'{name} {version}' for name, version in versions().items())}",
        f"declares  {declarations(ground.traits) or 'nothing'}",
        *([f"trusted   {ground.trusted}"] if ground.trusted else []),
    ]


def declarations(traits: Traits) -> str:
    """Return the declarations that differ from the defaults, such as ``ops mm; dtypes float16, bfloat16; out``."""
    defaults = Traits().as_json()
    return "; ".join(_declaration(name, value) for name, value in traits.as_json().items() if value != defaults[name])


def _declaration(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name
    if isinstance(value, dict):
        value = [f"{key} in {word}" for key, word in value.items()]
    return f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}"


def as_html(summary: Summary) -> str:
    """Return a self-contained HTML page without scripts. Text from elsewhere is escaped."""
    from rich.console import Console  # noqa: PLC0415 - see _line

    console = Console(record=True, file=io.StringIO(), width=PAGE_WIDTH)
    for part in (*map(_line, header_lines(summary.run.options, summary.run.ground)), *renderables(summary, page=True)):
        console.print(part)
    title = html.escape(f"{summary.standing}: {summary.run.ground.name}").replace("{", "{{").replace("}", "}}")
    return console.export_html(code_format=PAGE.replace("TITLE", title))


def renderables(summary: Summary, *, page: bool = False) -> Iterator[RenderableType]:
    """Yield the report in parts for a rich console. A ``page`` has more details, and maps of the wrong elements."""
    yield _table(tuple(p for p in summary.properties if p.reason != NOT_ASKED), page=page)
    most = PAGE_GROUPS if page else MOST_GROUPS
    for group in summary.groups[:most]:
        yield from _group_parts(summary, group, page=page)
    if len(summary.groups) > most:
        where = "--json FILE" if page else "--json FILE or --html FILE"
        yield _line(f"\n{len(summary.groups) - most} more kinds of failures: {where} has them all", "bold")
    if summary.complaints or summary.warnings or summary.notes or summary.choices:
        yield _line("")
    choices = list(summary.choices.items())
    for text in summary.notes:
        yield _line(text)
    if choices and not page:
        more = ", …: --json FILE has them all" if len(choices) > 1 else ""
        yield _line(f"{_count(len(choices), 'choice')} ran: {choices[0][0]} in {_count(choices[0][1], 'case')}{more}")
    for name, cases in choices if page else ():
        yield _line(f"ran: {name} in {_count(cases, 'case')}")
    yield from _listed("error", summary.complaints, "bold red")
    yield from _listed("warning", summary.warnings, "yellow")
    yield _line("")
    yield _line(_verdict(summary), "bold green" if summary.standing is Standing.CONFORMS else "bold red")
    for text in () if page else _next_steps(summary):
        yield _line(text)


def _listed(sort: str, texts: tuple[str, ...], style: str) -> Iterator[Text]:
    for text in texts[:MOST_GROUPS]:
        yield _line(f"{sort}: {text}", style)
    if len(texts) > MOST_GROUPS:
        yield _line(f"{_count(len(texts) - MOST_GROUPS, 'more ' + sort)}", style)


def _line(text: str, style: str = "") -> Text:
    # Import rich at the first print: its import takes longer than that of this package.
    from rich.text import Text  # noqa: PLC0415

    return Text(text, style=style)


def _unfolded(text: str, style: str) -> Text:
    """Return text to be copied, such as a command, that is never wrapped at the width of the terminal."""
    line = _line(text, style)
    line.no_wrap, line.overflow = True, "ignore"
    return line


def _table(properties: tuple[PropertySummary, ...], *, page: bool) -> TextTable:
    columns = {
        "executed": [str(p.executed) for p in properties],
        "failed": [str(p.failed) for p in properties],
        "refused": [str(p.refused) for p in properties],
    }
    if any(p.known for p in properties):
        columns["known"] = [str(p.known) for p in properties]
    if any(p.skipped for p in properties):
        columns["not run"] = [str(p.skipped) for p in properties]
    if page:
        errors = [p.error_over_bound for p in properties]
        columns["error / bound"] = ["" if x is None else "> 1" if x > 1 else f"{x:.2f}" for x in errors]
    table = TextTable(texts=("property", "meaning"), numbers=tuple(columns), last="verdict", optional=() if page else ("meaning",))
    for p, *numbers in zip(properties, *columns.values(), strict=True):
        standing = f"{p.standing}: {_short(p.reason)}" if p.reason else str(p.standing)
        table.add_row(_line(p.name), _line(p.meaning), *numbers, _line(standing, _STYLES[p.standing]))
    return table


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MOST_REASON else text[: MOST_REASON - 1] + "…"


def _group_parts(summary: Summary, group: FailureGroup, *, page: bool) -> Iterator[Text]:
    record, failure = group.found[0]
    names = group.by_property
    of = f" of {next(iter(names))}" if len(names) == 1 else ""
    yield _line(f"\n{_count(group.cases, 'case')}{of}: {group.looks_like}", "bold red")
    if not of:
        yield _line(f"  {', '.join(f'{name} {number}' for name, number in names.items())}; the smallest:", "dim")
    yield _line(f"  {record.case.id}" + (f"  choice {record.outcome.choice}" if record.outcome and record.outcome.choice else ""))
    lines = failure.message.splitlines()
    for line in lines if page else lines[:MOST_LINES]:
        yield _line(f"    {line}")
    if len(lines) > MOST_LINES and not page:
        yield _line(f"    … ({len(lines) - MOST_LINES} more lines)", "dim")
    if failure.index is not None:
        places = (f"of {tile} {at} at {place}" for tile, (at, place) in tile_places(failure.index).items())
        yield _line(f"    in the tile {', '.join(places)}", "dim")
    mapped = next(((r.case.id, f.heat) for r, f in group.found if f.heat is not None), None) if page else None
    if mapped is not None:
        yield _line(f"    where {mapped[0]} is wrong, batch {mapped[1].batch}, {mapped[1].rows} by {mapped[1].cols}:", "dim")
        yield from heat_lines(mapped[1])
    yield _unfolded(f"  again: {command(summary.run.options, [record.case.id], sanitize=record.sanitized)}", "cyan")
    yield _unfolded(f"     or: {pytest_command(summary.run.options, [record.case.id], sanitize=record.sanitized)}", "dim")
    others = [case_id for case_id in dict.fromkeys(r.case.id for r, _ in group.found) if case_id != record.case.id]
    for case_id in others[:PAGE_IDS] if page else ():
        yield _unfolded(f"  and {case_id}", "dim")
    if page and len(others) > PAGE_IDS:
        yield _line(f"  and {len(others) - PAGE_IDS} others", "dim")


def heat_lines(heat: HeatMap) -> Iterator[Text]:
    """Yield the rows of a heat map as coloured cells, then the legend of the colours."""
    for cells in heat.cells:
        line = _line("    ")
        for value in cells:
            line.append("  ", style=f"on {COLOURS[sum(value > step for step in SHADES) if math.isfinite(value) else -1]}")
        yield line
    key = _line("    ")
    for colour, words in zip(COLOURS, (*SHADES.values(), "NaN or infinity"), strict=True):
        key.append("  ", style=f"on {colour}").append(f" {words}  ")
    yield key


def _verdict(summary: Summary) -> str:
    runs = f", {_count(summary.sanitized, 'run')} under compute-sanitizer" if summary.sanitized else ""
    took = f"{_count(summary.executed, 'case')} executed, {summary.refused} refused{runs}, in {summary.seconds:.0f} s"
    if summary.standing is Standing.NOT_TESTED:
        so_far = f"interrupted, without a failure until then; {took}"
        return f"NOT TESTED: {so_far if summary.interrupted else _why_untested(summary)}"
    if summary.standing is Standing.CONFORMS and not summary.executed:
        return f"CONFORMS under compute-sanitizer, which is all that ran: {took}"
    if summary.standing is Standing.CONFORMS:
        tested = len(summary.properties) - len(summary.untested)
        return f"CONFORMS in {tested} of {_count(len(summary.properties), 'property', 'properties')}: {took}"
    what = _count(len(summary.complaints), "error")
    if summary.failed:
        failing = sum(p.standing is Standing.FAILS for p in summary.properties)
        what = f"{_count(failing, 'property', 'properties')}, {_count(summary.failed, 'case')}"
    return f"{'interrupted; ' if summary.interrupted else ''}FAILS: {what}; {took}"


def _why_untested(summary: Summary) -> str:
    if summary.complaints:
        return _short(summary.complaints[0])
    refusals = [r.outcome.reason for r in summary.records if r.refused and r.outcome]
    if refusals:
        return f"every case was refused, {_count(len(refusals), 'case')}, the first with {_short(refusals[0])}"
    if summary.records:
        return f"none of {_count(len(summary.records), 'case')} ran: {summary.records[0].reason}"
    return "no case matches both the declarations and the options"


def _next_steps(summary: Summary) -> Iterator[str]:
    options = summary.run.options
    if summary.failed:
        yield "Next: repeat a case with the command below it; --in-process lets a debugger in."
        if options.html is None:
            yield "      --html FILE maps the wrong elements; --save-failing DIR keeps the cases for --repro DIR."
    elif summary.standing is Standing.NOT_TESTED and summary.refused:
        yield "Next: declare what the GEMM takes with --trait, such as dtypes=float16 or multiples=8,8,8; only that is then tested."
    elif summary.standing is Standing.CONFORMS and summary.sampled:
        yield "Next: this was a sample; --seed N takes another one; without --max-cases and --max-seconds every case runs."
    elif summary.standing is Standing.CONFORMS and options.level != "exhaustive" and not options.repro:
        yield f"Next: --level {'full' if options.level == 'smoke' else 'exhaustive'} tests more."
    open_ = [p for p in summary.untested if p.reason != NOT_ASKED]
    if open_ and summary.standing is not Standing.NOT_TESTED:
        yield f"{_count(len(open_), 'property', 'properties')} not tested: the table gives the reasons; declare more with --trait."


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
