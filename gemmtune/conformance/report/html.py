"""A run as one HTML page that needs nothing else: no scripts, no files beside it. Text that came from elsewhere is escaped."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jinja2

from ...toolchain.render import load_template
from ..bench.outcome import HeatMap
from ..runs.reproduction import command, pytest_command
from .summary import NOT_ASKED, FailureGroup, Standing, Summary, tile_places
from .text import header_lines

__all__ = ["Strip", "as_html", "strips"]

MOST_GROUPS = 60
MOST_IDS = 40
"""Further cases that are listed below the first one of a group."""
_STEPS = (1.0, 4.0, 64.0, 1e4)
"""|got − expected| over the tolerance: right up to the first, then where shades change. Infinity and NaN have their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Neighbouring cells of one row of a heat map with the same shade: 0 is right, 5 is infinity or NaN."""

    row: int
    start: int
    length: int
    shade: int


def strips(heat: HeatMap) -> Iterator[Strip]:
    """The cells of a heat map, row by row."""
    for row, cells in enumerate(heat.cells):
        start = 0
        for shade, same in itertools.groupby(cells, key=_shade):
            length = len(list(same))
            yield Strip(row=row, start=start, length=length, shade=shade)
            start += length


def _shade(value: float) -> int:
    return 5 if not math.isfinite(value) else sum(value > step for step in _STEPS)


def as_html(summary: Summary) -> str:
    """The page."""
    header = [line.split(maxsplit=1) for line in header_lines(summary.run.options, summary.run.ground)]
    return _template().render(
        summary=summary,
        header=[(words[0], words[1] if len(words) > 1 else "") for words in header],
        properties=[p for p in summary.properties if p.reason != NOT_ASKED],
        groups=[_group(summary, group) for group in summary.groups[:MOST_GROUPS]],
        hidden=max(0, len(summary.groups) - MOST_GROUPS),
        style={Standing.CONFORMS: "good", Standing.FAILS: "bad", Standing.NOT_TESTED: "none"},
    )


def _group(summary: Summary, group: FailureGroup) -> dict[str, Any]:
    record, failure = group.found[0]
    heat = next((f.heat for _, f in group.found if f.heat is not None), None)
    mapped = next((r.case.id for r, f in group.found if f.heat is not None), "")
    ids = [case_id for case_id in dict.fromkeys(r.case.id for r, _ in group.found) if case_id != record.case.id]
    return {
        "group": group,
        "record": record,
        "failure": failure,
        "tiles": tile_places(failure.index) if failure.index is not None else {},
        "heat": heat,
        "mapped": mapped,
        "strips": list(strips(heat)) if heat is not None else [],
        "others": len(ids),
        "ids": ids[:MOST_IDS],
        "more_ids": max(0, len(ids) - MOST_IDS),
        "command": command(summary.run.options, [record.case.id], sanitize=record.sanitized),
        "pytest_command": pytest_command(summary.run.options, [record.case.id], sanitize=record.sanitized),
    }


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(load_template("gemmtune.conformance.report", "report.html.jinja"))
