"""A run as a page of HTML: the verdict, the failures with maps of the wrong elements, then each property."""

import itertools
import math
from collections.abc import Iterator

from markupsafe import Markup

from ...page import Cell, Table, page, section
from ...selector.text_table import counted
from ..bench.outcome import HeatMap
from ..runs.files import command, pytest_command
from .summary import NOT_ASKED, FailureGroup, PropertySummary, Standing, Summary, shown_counts, tile_places
from .text import header_lines, verdict_line

MOST_GROUPS = 60
MOST_IDS = 40
"""Further cases listed below the first one of a group."""
SHADES = {1.0: "right", 4.0: "up to 4 times the tolerance", 64.0: "up to 64 times", 1e4: "up to 10,000 times", math.inf: "more"}
"""Upper limit of |got − expected| ÷ tolerance for each shade. NaN and infinity have a shade of their own."""
COLOURS = ("var(--panel)", "#f8d477", "#f0953f", "#d9482b", "#8f1616", "#6a1fb1")
MOST_CELL, MOST_SIDE = 12, 480
"""Largest side of a cell of a map, and of the map, in pixels."""
_MARKS = {Standing.CONFORMS: "good", Standing.FAILS: "bad", Standing.NOT_TESTED: "soft"}


def as_html(summary: Summary) -> str:
    """Return a self-contained page. Text from elsewhere is escaped."""
    run, asked = summary.run, [p for p in summary.properties if p.reason != NOT_ASKED]
    tested, untested = ([p for p in asked if (p.standing is Standing.NOT_TESTED) == left] for left in (False, True))
    lines = [("soft", line) for line in header_lines(run.options, run.ground)]
    lines += [("bad", f"error: {text}") for text in summary.complaints] + [("bad", f"warning: {text}") for text in summary.warnings]
    rest = len(summary.groups) - MOST_GROUPS
    lines += [("", text) for text in (*summary.notes, *([f"--json FILE has {rest} more kinds of failures"] if rest > 0 else []))]
    return page(
        f"{summary.standing}: {run.ground.name}",
        Markup('<p><b class="{}">{}</b></p>').format(_MARKS[summary.standing], verdict_line(summary)),
        *(Markup('<p class="{}">{}</p>').format(mark, text) for mark, text in lines),
        *(section("Failures", *(_group(summary, group) for group in summary.groups[:MOST_GROUPS])) for _ in summary.groups[:1]),
        *(section("Properties", _properties(tested).html) for _ in tested[:1]),
        *(section("Not tested", _untested(untested).html) for _ in untested[:1]),
        *(section("Choices that ran", _choices(summary).html) for _ in [*summary.choices][:1]),
    )


def _properties(properties: list[PropertySummary]) -> Table:
    counts, rows = shown_counts(properties), []
    for p in properties:
        error = p.error_over_bound
        shown = "" if error is None else "> 1" if error > 1 else f"{error:.2f}"
        numbers = (Cell(text=str(getattr(p, name)), number=getattr(p, name)) for name in counts)
        over = Cell(text=shown, number=-1.0 if error is None else error)
        rows.append((Cell(text=p.name), Cell(text=str(p.standing), mark=_MARKS[p.standing]), *numbers, over, Cell(text=p.meaning)))
    names = ("property", "verdict", *counts.values(), "error / bound", "meaning")
    return Table(name="properties", columns=names, rows=rows, filters=("verdict",), minor=("refused",))


def _untested(properties: list[PropertySummary]) -> Table:
    rows = [(Cell(text=p.name), Cell(text=p.reason), Cell(text=p.meaning)) for p in properties]
    return Table(name="untested", columns=("property", "reason", "meaning"), rows=rows)


def _choices(summary: Summary) -> Table:
    rows = [(Cell(text=name), Cell(text=str(cases), number=cases)) for name, cases in summary.choices.items()]
    return Table(name="choices", columns=("choice", "cases"), rows=rows)


def _group(summary: Summary, group: FailureGroup) -> Markup:
    """Return a kind of failure: where it shows, the smallest case with its map, how to repeat it, and the other cases."""
    record, failure = group.found[0]
    choice = record.outcome.choice if record.outcome else ""
    names = ", ".join(f"{name} {number}" for name, number in group.by_property.items())
    parts = [
        Markup("<h3>{}: {}</h3><p class=soft>{}</p>").format(counted(group.cases, "case"), group.looks_like, names),
        Markup("<p><code>{}</code>{}</p><pre>{}</pre>").format(record.case.id, f" choice {choice}" * bool(choice), failure.message),
    ]
    if failure.index is not None:
        places = (f"of {tile} {at} at {place}" for tile, (at, place) in tile_places(failure.index).items())
        parts.append(Markup("<p class=soft>In the tile {}.</p>").format(", ".join(places)))
    mapped = next(((r.case.id, f.heat) for r, f in group.found if f.heat is not None), None)
    if mapped is not None:
        parts.append(heat_map(*mapped))
    for again in (command, pytest_command):
        parts.append(Markup("<pre>{}</pre>").format(again(summary.run.options, [record.case.id], sanitize=record.sanitized)))
    others = [case_id for case_id in dict.fromkeys(r.case.id for r, _ in group.found) if case_id != record.case.id]
    if others:
        ids = [*others[:MOST_IDS], *([f"and {len(others) - MOST_IDS} others"] if len(others) > MOST_IDS else [])]
        shown = Markup("<details><summary>{}</summary><pre>{}</pre></details>")
        parts.append(shown.format(counted(len(others), "other case"), "\n".join(ids)))
    return Markup("\n").join(parts)


def heat_map(case_id: str, heat: HeatMap) -> Markup:
    """Return a map of the wrong elements with the legend of its colours."""
    rows, cols = len(heat.cells), max(map(len, heat.cells), default=0)
    cell = min(MOST_CELL, MOST_SIDE / max(rows, cols, 1))
    about = f"Where {case_id} is wrong, batch {heat.batch}, {heat.rows} by {heat.cols}:"
    key = zip(COLOURS, (*SHADES.values(), "NaN or infinity"), strict=True)
    items = (Markup('<li><i style="background:{}"></i>{}</li>').format(colour, words) for colour, words in key)
    picture = '<svg class=map role=img aria-label="{}" width="{:g}" height="{:g}" viewBox="0 0 {} {}">{}</svg>'
    return Markup("<p class=soft>{}</p>\n" + picture + "\n<ul class=legend>{}</ul>").format(
        about, about, cols * cell, rows * cell, cols, rows, Markup("").join(_cells(heat)), Markup("").join(items)
    )


def _cells(heat: HeatMap) -> Iterator[Markup]:
    for y, values in enumerate(heat.cells):
        x = 0
        for shade, run in itertools.groupby(map(_shade, values)):
            width = len(list(run))
            yield Markup('<rect x="{}" y="{}" width="{}" height="1" fill="{}"/>').format(x, y, width, COLOURS[shade])
            x += width


def _shade(value: float) -> int:
    return sum(value > step for step in SHADES) if math.isfinite(value) else len(COLOURS) - 1
