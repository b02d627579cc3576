"""A run as text for a terminal: the GEMM, standings, failures, next steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...declaration.traits import Traits
from ...selector.text_table import TextTable, counted
from ..bench.outcome import cut_short_by
from ..options import RunOptions
from ..runs.files import command, pytest_command
from ..runs.isolation import Ground
from .summary import NOT_ASKED, FailureGroup, PropertySummary, Standing, Summary, shown_counts, tile_places, versions

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

MOST_GROUPS = 12
MOST_REASON = 160
MOST_LINES = 22
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


def renderables(summary: Summary) -> Iterator[RenderableType]:
    """Yield the report in parts for a rich console."""
    yield _table(tuple(p for p in summary.properties if p.reason != NOT_ASKED))
    for group in summary.groups[:MOST_GROUPS]:
        yield from _group_parts(summary, group)
    if len(summary.groups) > MOST_GROUPS:
        yield _line(
            f"\n{len(summary.groups) - MOST_GROUPS} more kinds of failures: --json FILE or --html FILE has them all", "bold"
        )
    if summary.complaints or summary.warnings or summary.notes or summary.choices:
        yield _line("")
    choices = list(summary.choices.items())
    for text in summary.notes:
        yield _line(text)
    if choices:
        more = ", …: --json FILE has them all" if len(choices) > 1 else ""
        yield _line(f"{counted(len(choices), 'choice')} ran: {choices[0][0]} in {counted(choices[0][1], 'case')}{more}")
    yield from _listed("error", summary.complaints, "bold red")
    yield from _listed("warning", summary.warnings, "yellow")
    yield _line("")
    yield _line(verdict_line(summary), "bold green" if summary.standing is Standing.CONFORMS else "bold red")
    for text in _next_steps(summary):
        yield _line(text)


def _listed(sort: str, texts: tuple[str, ...], style: str) -> Iterator[Text]:
    for text in texts[:MOST_GROUPS]:
        yield _line(f"{sort}: {text}", style)
    if len(texts) > MOST_GROUPS:
        yield _line(f"{counted(len(texts) - MOST_GROUPS, 'more ' + sort)}", style)


def _line(text: str, style: str = "") -> Text:
    # Import rich at the first print: its import takes longer than that of this package.
    from rich.text import Text  # noqa: PLC0415

    return Text(text, style=style)


def _unfolded(text: str, style: str) -> Text:
    """Return text to be copied, such as a command, that is never wrapped at the width of the terminal."""
    line = _line(text, style)
    line.no_wrap, line.overflow = True, "ignore"
    return line


def _table(properties: tuple[PropertySummary, ...]) -> TextTable:
    counts = shown_counts(properties)
    table = TextTable(texts=("property", "meaning"), numbers=tuple(counts.values()), last="verdict", optional=("meaning",))
    for p in properties:
        numbers = (str(getattr(p, name)) for name in counts)
        standing = f"{p.standing}: {_short(p.reason)}" if p.reason else str(p.standing)
        table.add_row(_line(p.name), _line(p.meaning), *numbers, _line(standing, _STYLES[p.standing]))
    return table


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MOST_REASON else text[: MOST_REASON - 1] + "…"


def _group_parts(summary: Summary, group: FailureGroup) -> Iterator[Text]:
    record, failure = group.found[0]
    names = group.by_property
    of = f" of {next(iter(names))}" if len(names) == 1 else ""
    yield _line(f"\n{counted(group.cases, 'case')}{of}: {group.looks_like}", "bold red")
    if not of:
        yield _line(f"  {', '.join(f'{name} {number}' for name, number in names.items())}; the smallest:", "dim")
    yield _line(f"  {record.case.id}" + (f"  choice {record.outcome.choice}" if record.outcome and record.outcome.choice else ""))
    lines = failure.message.splitlines()
    for line in lines[:MOST_LINES]:
        yield _line(f"    {line}")
    if len(lines) > MOST_LINES:
        yield _line(f"    … ({len(lines) - MOST_LINES} more lines)", "dim")
    if failure.index is not None:
        places = (f"of {tile} {at} at {place}" for tile, (at, place) in tile_places(failure.index).items())
        yield _line(f"    in the tile {', '.join(places)}", "dim")
    yield _unfolded(f"  again: {command(summary.run.options, [record.case.id], sanitize=record.sanitized)}", "cyan")
    yield _unfolded(f"     or: {pytest_command(summary.run.options, [record.case.id], sanitize=record.sanitized)}", "dim")


def verdict_line(summary: Summary) -> str:
    """Return the standing of the run with what it rests on."""
    runs = f", {counted(summary.sanitized, 'run')} under compute-sanitizer" if summary.sanitized else ""
    took = f"{counted(summary.executed, 'case')} executed, {summary.refused} refused{runs}, in {summary.seconds:.0f} s"
    if summary.standing is Standing.NOT_TESTED:
        so_far = f"interrupted, without a failure until then; {took}"
        return f"NOT TESTED: {so_far if summary.interrupted else _why_untested(summary)}"
    if summary.standing is Standing.CONFORMS and not summary.executed:
        return f"CONFORMS under compute-sanitizer, which is all that ran: {took}"
    if summary.standing is Standing.CONFORMS:
        tested = len(summary.properties) - len(summary.untested)
        return f"CONFORMS in {tested} of {counted(len(summary.properties), 'property', 'properties')}: {took}"
    what = counted(len(summary.complaints), "error")
    if summary.failed:
        failing = sum(p.standing is Standing.FAILS for p in summary.properties)
        what = f"{counted(failing, 'property', 'properties')}, {counted(summary.failed, 'case')}"
    return f"{'interrupted; ' if summary.interrupted else ''}FAILS: {what}; {took}"


def _why_untested(summary: Summary) -> str:
    if summary.complaints:
        return _short(summary.complaints[0])
    refusals = [r.outcome.reason for r in summary.records if r.refused and r.outcome]
    if refusals:
        return f"every case was refused, {counted(len(refusals), 'case')}, the first with {_short(refusals[0])}"
    if ended := cut_short_by(summary.records):
        return ended
    if summary.records:
        return f"none of {counted(len(summary.records), 'case')} ran: {summary.records[0].reason}"
    return "no case matches both the declarations and the options"


def _next_steps(summary: Summary) -> Iterator[str]:
    options = summary.run.options
    if summary.failed:
        yield "Next: repeat a case with the command below it; --in-process lets a debugger in."
        if options.html is None:
            yield "      --html FILE maps the wrong elements; --save-failing DIR keeps the cases for --repro DIR."
    elif summary.standing is Standing.NOT_TESTED and summary.refused:
        if " argument" in _why_untested(summary):
            yield "Next: let the GEMM take the arguments of torch's operation, such as f(a, b), if the error is about arguments."
        yield "Next: declare what the GEMM takes with --trait, such as dtypes=float16 or multiples=8,8,8; only that is then tested."
    elif summary.standing is Standing.CONFORMS and summary.sampled:
        yield "Next: this was a sample; --seed N takes another one; without --max-cases and --max-seconds every case runs."
    elif summary.standing is Standing.CONFORMS and options.level != "exhaustive" and not options.repro:
        yield f"Next: --level {'full' if options.level == 'smoke' else 'exhaustive'} tests more."
    open_ = [p for p in summary.untested if p.reason != NOT_ASKED]
    if open_ and summary.standing is not Standing.NOT_TESTED:
        yield f"{counted(len(open_), 'property', 'properties')} not tested: the table gives the reasons; declare more with --trait."
