"""A run as text: what is tested, then the verdict on each property, the failures, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...selector.table import new_table
from ..gemms.traits import Traits
from ..options import RunOptions
from ..runs.reproduction import command, pytest_command
from ..runs.run import Ground
from .summary import NOT_ASKED, FailureGroup, PropertySummary, Standing, Summary, tile_places, versions

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["declarations", "header_lines", "renderables"]

MOST_GROUPS = 12
MOST_REASON = 160
MOST_LINES = 14
_STYLES = {Standing.CONFORMS: "green", Standing.FAILS: "bold red", Standing.NOT_TESTED: "dim"}


def header_lines(options: RunOptions, ground: Ground) -> list[str]:
    """What is tested, where, by which versions and declarations."""
    description = ground.description
    sm = f" (SM{description.sm})" if description.sm else ""
    return [
        f"GEMM      {description.name}",
        f"device    {description.device_name}{sm}",
        f"level     {options.level}",
        f"versions  {', '.join(f'{name} {version}' for name, version in versions().items())}",
        f"declares  {declarations(description.traits) or 'nothing'}",
    ]


def declarations(traits: Traits) -> str:
    """What is declared beyond the defaults, such as ``ops mm; dtypes float16, bfloat16; out``."""
    defaults = Traits().as_json()
    return "; ".join(_declaration(name, value) for name, value in traits.as_json().items() if value != defaults[name])


def _declaration(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name
    if isinstance(value, dict):
        value = [f"{key} in {word}" for key, word in value.items()]
    return f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}"


def renderables(summary: Summary) -> Iterator[RenderableType]:
    """The report as parts that a rich console prints."""
    yield _table(tuple(p for p in summary.properties if p.reason != NOT_ASKED))
    for group in summary.groups[:MOST_GROUPS]:
        yield from _group_parts(summary, group)
    if len(summary.groups) > MOST_GROUPS:
        yield _line(
            f"\n{len(summary.groups) - MOST_GROUPS} more kinds of failures: --json FILE or --html FILE has them all", "bold"
        )
    if summary.complaints or summary.warnings or summary.notes or summary.choices:
        yield _line("")
    for text in (*summary.notes, *_choices(summary)):
        yield _line(text)
    yield from _listed("error", summary.complaints, "bold red")
    yield from _listed("warning", summary.warnings, "yellow")
    yield _line("")
    yield _line(_verdict(summary), "bold green" if summary.standing is Standing.CONFORMS else "bold red")
    for text in _next_steps(summary):
        yield _line(text)


def _choices(summary: Summary) -> Iterator[str]:
    if choices := summary.choices:
        first = next(iter(choices))
        more = ", …: --json FILE has them all" if len(choices) > 1 else ""
        yield f"{_count(len(choices), 'choice')} ran: {first} in {_count(choices[first], 'case')}{more}"


def _listed(sort: str, texts: tuple[str, ...], style: str) -> Iterator[Text]:
    for text in texts[:MOST_GROUPS]:
        yield _line(f"{sort}: {text}", style)
    if len(texts) > MOST_GROUPS:
        yield _line(f"{_count(len(texts) - MOST_GROUPS, 'more ' + sort)}", style)


def _line(text: str, style: str = "") -> Text:
    # rich is imported when something is printed: it takes longer to import than this package.
    from rich.text import Text  # noqa: PLC0415

    return Text(text, style=style)


def _unfolded(text: str, style: str) -> Text:
    """Text that is copied, such as a command: as long as it is, whatever the width of the terminal."""
    line = _line(text, style)
    line.no_wrap, line.overflow = True, "ignore"
    return line


def _table(properties: tuple[PropertySummary, ...]) -> Table:
    known, skipped = any(p.known for p in properties), any(p.skipped for p in properties)
    more = [title for title, there in (("known", known), ("not run", skipped)) if there]
    table = new_table(texts=("property", "meaning"), numbers=("executed", "failed", "refused", *more), last="verdict")
    for p in properties:
        numbers = [p.executed, p.failed, p.refused, *([p.known] if known else []), *([p.skipped] if skipped else [])]
        verdict = f"{p.standing}: {_short(p.reason)}" if p.reason else str(p.standing)
        table.add_row(_line(p.name), _line(p.meaning), *map(str, numbers), _line(verdict, _STYLES[p.standing]))
    return table


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MOST_REASON else text[: MOST_REASON - 1] + "…"


def _group_parts(summary: Summary, group: FailureGroup) -> Iterator[Text]:
    record, failure = group.found[0]
    names = group.by_property
    of = f" of {next(iter(names))}" if len(names) == 1 else ""
    yield _line(f"\n{_count(group.cases, 'case')}{of}: {group.looks_like}", "bold red")
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
        return summary.complaints[0]
    refusals = [r.outcome.reason for r in summary.records if r.refused and r.outcome]
    if refusals:
        return f"nothing but refusals, {_count(len(refusals), 'case')}, the first with {_short(refusals[0])}"
    if summary.records:
        return f"none of {_count(len(summary.records), 'case')} was run: {summary.records[0].reason}"
    return "no case fits what is declared and asked for"


def _next_steps(summary: Summary) -> Iterator[str]:
    options = summary.run.options
    if summary.failed:
        yield "Next: run a case again with the line below it; --in-process lets a debugger in."
        if options.html is None:
            yield "      --html FILE shows where results are wrong; --save-failing DIR keeps the cases for --repro DIR."
    elif summary.standing is Standing.NOT_TESTED and summary.refused:
        yield "Next: say what the GEMM takes with --trait, such as dtypes=float16 or multiples=8,8,8; that is then what is tested."
    elif summary.standing is Standing.CONFORMS and summary.sampled:
        yield "Next: this was a sample; --seed N takes another one, and without --max-cases and --max-seconds every case runs."
    elif summary.standing is Standing.CONFORMS and options.level != "exhaustive" and not options.repro:
        yield f"Next: --level {'full' if options.level == 'smoke' else 'exhaustive'} tests more."
    open_ = [p for p in summary.untested if p.reason != NOT_ASKED]
    if open_ and summary.standing is not Standing.NOT_TESTED:
        yield f"{_count(len(open_), 'property', 'properties')} not tested: the table says why, --trait declares what is missing."


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
