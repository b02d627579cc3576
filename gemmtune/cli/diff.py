"""``gemmtune diff``: the picks of two stores or results, problem by problem."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from ..report.entries import Pair, pairs_of
from ..report.sources import read
from ..selector.result import busy
from ..selector.text_table import NAMES, TextTable, counted
from ..timing.rounds import BUSY_MARK, tie
from .output import STDOUT, write_json
from .printing import show


def diff(before: str, after: str, every: bool, json_file: str | None) -> None:
    """Compare two files, each a store, an export of one, or a result of ``tune --json``."""
    pairs = pairs_of(read(Path(before)).entries, read(Path(after)).entries)
    if json_file != STDOUT:
        show(_parts(pairs, every))
    write_json(json_file, [pair.to_json() for pair in pairs])


def _parts(pairs: list[Pair], every: bool) -> Iterator[RenderableType]:
    both = sorted((pair for pair in pairs if pair.ratio), key=lambda pair: -(pair.ratio or 0))
    table = TextTable(texts=("problem", NAMES), numbers=("µs before", "µs after", "ratio"), last="was", optional=("was",))
    for pair in both:
        if (every or pair.differs) and pair.before and pair.after:
            was = ("" if pair.before.name == pair.after.name else pair.before.name or "none") + busy(pair.disturbed)
            numbers = (f"{pair.before.time_us:.1f}", f"{pair.after.time_us:.1f}", f"{pair.ratio:.3g}")
            cells = (pair.either.text, pair.after.name or "none", *numbers, was)
            table.add_row(*map(Text, cells), style="red" if pair.slower else None)
    if table.rows:
        yield table
    for name, alone in (("before", [p for p in pairs if p.after is None]), ("after", [p for p in pairs if p.before is None])):
        yield from (Text(f"only {name}: {pair.either.text}") for pair in alone)
    yield Text(summary(pairs), style="bold")


def summary(pairs: list[Pair]) -> str:
    """Return how many problems became slower and faster, and by which margin."""
    both = [pair for pair in pairs if pair.ratio]
    by = f"by over {tie(''):.0%}" + (f", {tie(BUSY_MARK):.0%} {BUSY_MARK}" if any(pair.disturbed for pair in both) else "")
    slower, faster = sum(pair.slower for pair in both), sum(pair.faster for pair in both)
    return f"{counted(len(both), 'problem')} on both sides: {slower} slower, {faster} faster {by}"
