"""``gemmtune report``, ``replay`` and ``diff``: stores and results as a page, Markdown, a picture or a table."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.console import RenderableType
from rich.text import Text

from .. import settings
from ..replacing import write_text
from ..report import markdown, pages
from ..report.entries import Pair, pairs_of
from ..report.picture import draw
from ..report.replay import Order, Replay, replay, summary
from ..report.replay_section import replay_section
from ..report.sources import Source, of_store, read
from ..selector.result import busy
from ..selector.text_table import NAMES, TextTable, counted
from ..settings import Search
from ..timing.rounds import BUSY_MARK, tie
from .files import STDOUT
from .output import write_json
from .printing import answer
from .stores import opened

MOST_FILES = 2
SEARCHES: tuple[Search, ...] = ("quick", "default")
"""Searches that are replayed unless others are named. An exhaustive one asks for choices that few stores have."""


def report(files: Sequence[str], html: str | None, md: str | None, png: str | None, replayed: bool, json_file: str | None) -> None:
    """Write what was asked for, or print Markdown. ``replayed`` adds a section about searches to a page."""
    if replayed and html is None:
        raise click.UsageError("--replay: expected --html too: the section is part of the page; gemmtune replay prints a table")
    if len(files) > MOST_FILES:
        raise click.UsageError(f"FILE: got {len(files)}, expected one, or two to compare")
    sources = [read(Path(file)) for file in files] or [own_source()]
    if len({source.name for source in sources}) < len(sources):
        sources = [replace(source, name=name) for source, name in zip(sources, _told_apart(files), strict=True)]
    if not sources[-1].entries and not sources[-1].tables:
        raise click.ClickException(f"{sources[-1].name}: got no measurement; gemmtune tune makes some")
    try:
        if html is not None:
            more = [replay_section(replay(sources[-1].known, SEARCHES, settings.current()))] if replayed else []
            write_text(html, pages.report(sources, *more))
        if md is not None:
            write_text(md, markdown.report(sources))
        if png is not None:
            draw(sources[-1], Path(png))
    except OSError as error:
        raise click.ClickException(f"cannot write {error.filename}: {error.strerror}") from error
    written = [file for file in (html, md, png) if file is not None]
    if json_file != STDOUT:
        click.echo("\n".join(f"wrote {file}" for file in written) if written else markdown.report(sources), nl=bool(written))
    write_json(json_file, [source.to_json() for source in sources])


def _told_apart(files: Sequence[str]) -> list[str]:
    """Return the last parts of paths, as many as tell the files apart."""
    ends = [Path(file).parts for file in files]
    counts = range(2, max(map(len, ends)) + 1)
    names = (["/".join(parts[-count:]) for parts in ends] for count in counts)
    return next((found for found in names if len({*found}) == len(files)), [*files])


def replay_store(file: str | None, search: tuple[Search, ...], order: tuple[Order, ...], every: int, json_file: str | None) -> None:
    """Print the regrets of each search and order."""
    source = own_source() if file is None else read(Path(file))
    found = replay(source.known[::every], search or SEARCHES, settings.current(), order or ("tuning", "ranked"))
    if not found.curves:
        raise click.ClickException(
            f"{source.name}: got {counted(len(source.known), 'problem')}, expected some with enough measured choices:"
            + " tune with --search exhaustive"
            + "".join(f"; {count}: {reason}" for reason, count in found.skipped.items())
        )
    head = f"{source.name}: {counted(found.problems, 'problem')}, {found.measured:g} stored choices each (median)"
    left_out = (f"{counted(count, 'problem')} left out: {reason}" for reason, count in found.skipped.items())
    answer(json_file, found.to_json(), (head, _regrets(found), *left_out))


def own_source() -> Source:
    """Return the contents of the store in force."""
    store = opened(checked=False)
    return of_store(store, store.path.name if store.path else "store")


def _regrets(found: Replay) -> TextTable:
    """Return a row for each budget. Regrets are percentages over the best stored choice."""
    table = TextTable(texts=("search", "order"), numbers=("choices", "median %", "95th %", "largest %"), last="known")
    for curve in found.curves:
        for budget in curve.budgets:
            numbers = (f"{100 * value:.1f}" for value in summary(curve.at(budget)).values())
            last = f"{curve.known:.0%} of its choices" if budget == curve.budgets[-1] else ""
            table.add_row(Text(curve.search), Text(curve.order), str(budget), *numbers, last)
    return table


def diff(before: str, after: str, every: bool, json_file: str | None) -> None:
    """Compare two files, each a store, an export of one, or a result of ``tune --json``."""
    pairs = pairs_of(read(Path(before)).entries, read(Path(after)).entries)
    answer(json_file, [pair.to_json() for pair in pairs], _changes(pairs, every))


def _changes(pairs: list[Pair], every: bool) -> Iterator[RenderableType]:
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
    by = f"by over {tie(''):.0%}" + (f", or {tie(BUSY_MARK):.0%} {BUSY_MARK}" if any(pair.disturbed for pair in both) else "")
    slower, faster = sum(pair.slower for pair in both), sum(pair.faster for pair in both)
    yield Text(f"{counted(len(both), 'problem')} on both sides: {slower} slower, {faster} faster {by}", style="bold")
