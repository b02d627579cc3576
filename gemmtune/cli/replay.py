"""``gemmtune replay``: searches and orders of trial, replayed on stored measurements."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from .. import settings
from ..report.replay import Order, Replay, replay, summary
from ..report.sources import Source, of_store, read
from ..selector.text_table import TextTable
from ..settings import Search
from .output import STDOUT, write_json
from .printing import show as print_parts
from .stores import opened

SEARCHES: tuple[Search, ...] = ("quick", "default")
"""Searches that are replayed unless others are named. An exhaustive one asks for choices that few stores have."""


def replay_store(file: str | None, search: tuple[Search, ...], order: tuple[Order, ...], every: int, json_file: str | None) -> None:
    """Print the regrets of each search and order."""
    source = own_source() if file is None else read(Path(file))
    found = replay(source.known[::every], search or SEARCHES, settings.current(), order or ("tuning", "ranked"))
    if not found.curves:
        raise click.ClickException(
            f"{source.name}: got {len(source.known)} problems, expected some with enough measured choices"
            + "".join(f"; {count}: {reason}" for reason, count in found.skipped.items())
        )
    if json_file != STDOUT:
        head = f"{source.name}: {found.problems} problems, {found.measured:g} stored choices each (median)"
        print_parts((head, _table(found), *(f"{count} problems left out: {reason}" for reason, count in found.skipped.items())))
    write_json(json_file, found.to_json())


def own_source() -> Source:
    """Return the contents of the store in force."""
    store = opened()
    return of_store(store, store.path.name if store.path else "store")


def _table(found: Replay) -> TextTable:
    """Return a row for each budget. Regrets are percentages over the best stored choice."""
    table = TextTable(texts=("search", "order"), numbers=("choices", "median %", "95th %", "largest %"), last="known")
    for curve in found.curves:
        for budget in curve.budgets:
            numbers = (f"{100 * value:.1f}" for value in summary(curve.at(budget)).values())
            last = f"{curve.known:.0%} of its choices" if budget == curve.budgets[-1] else ""
            table.add_row(Text(curve.search), Text(curve.order), str(budget), *numbers, last)
    return table
