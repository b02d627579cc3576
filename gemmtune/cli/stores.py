"""``gemmtune show``, ``export``, ``import`` and ``merge``: contents and exchange of the store."""

from __future__ import annotations

import dataclasses
import json
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from .. import settings
from ..errors import InvalidProblemError, StoreError
from ..selector.candidates import outcome_of
from ..selector.pick import pick, right
from ..selector.range_result import table_lines
from ..selector.result import Outcome, busy
from ..selector.segments import INVARIANT, TABLE
from ..selector.segments import Table as Segments
from ..selector.text_table import TextTable
from ..store.store import Absorbed, Ranged, Row, Store, open_store
from .output import STDOUT, write_json
from .printing import show as print_parts
from .selection import Selection, class_text, machine_text, problem_text

PROBLEM_CHARS = 120
"""Length at which a table cuts a problem's text: an epilogue may have a thousand characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Stored results of one problem on one machine."""

    key: str
    fingerprint: str
    rows: tuple[Row, ...]

    @property
    def outcomes(self) -> list[Outcome]:
        """Correct choices, the pick first and the others by time."""
        ordered = right(map(outcome_of, self.rows))
        chosen = pick(ordered)
        return sorted(ordered, key=lambda o: o is not chosen)

    @property
    def speedup_over_torch(self) -> float | None:
        """Direct time of torch's operation, divided by the time of the pick, as in ``ProblemResult``."""
        torch_us = next((o.direct_us for o in self.outcomes if o.baseline), None)
        best_us = self.outcomes[0].time_us if self.outcomes else None
        return torch_us / best_us if torch_us and best_us else None

    @property
    def disturbed(self) -> str:
        """The disturbance of the pick's measurement, or of torch's; empty if none was seen."""
        return next((o.disturbed for i, o in enumerate(self.outcomes) if (i == 0 or o.baseline) and o.disturbed), "")

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with all fields of the choices' rows."""
        return {
            "problem": {"text": problem_text(self.key)} | json.loads(self.key),
            "machine": json.loads(self.fingerprint),
            "pick": self.outcomes[0].name if self.outcomes else None,
            "speedup_over_torch": self.speedup_over_torch,
            "disturbed": self.disturbed,
            "choices": [row.to_json() for row in self.rows],
        }


def show(shapes: Sequence[str], match: str | None, here: bool, rows: int, json_file: str | None) -> None:
    """Show the contents of the store: the pick and the next best choices by machine and problem, and the tables for every M."""
    store, wanted = opened(), Selection.of(shapes, match, here)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in store.every_row():
        groups.setdefault(row.scope, []).append(row)
    groups = {scope: group for scope, group in groups.items() if wanted.has(*scope)}
    tables = [fact for fact in store.every_ranged() if wanted.has_table(fact.key, fact.fingerprint)]
    known = [Known(key=key, fingerprint=machine, rows=tuple(group)) for (key, machine), group in groups.items()]
    known.sort(key=lambda k: (k.fingerprint, problem_text(k.key)))
    if json_file != STDOUT:
        nothing = "empty; gemmtune tune fills it" if wanted.empty else "nothing of what was asked for"
        print_parts((f"store: {store.path}", *(_parts(known, rows) if known or tables else [nothing]), *_tables(tables)))
    write_json(json_file, [*(k.to_json() for k in known), *(fact.to_json() for fact in tables)])


def export_store(file: str, json_file: str | None) -> None:
    """Write the whole store to FILE, as JSON that import reads."""
    store = opened()
    count = store.export_file(file)
    if json_file != STDOUT:
        click.echo(f"{count} rows of {store.path} written to {file}")
    write_json(json_file, {"rows": count, "store": str(store.path), "file": file})


def import_store(file: str, json_file: str | None) -> None:
    """Merge a FILE that export wrote into the store. If both have a choice, the later measurement stays."""
    store = opened()
    _report(store, store.import_file(file), file, json_file)


def merge(other_store: str, json_file: str | None) -> None:
    """Merge another store, an SQLite file, into the store. If both have a choice, the later measurement stays."""
    store = opened()
    _report(store, store.merge(other_store), other_store, json_file)


def opened() -> Store:
    """Return the store of the settings. Raises StoreError if its file cannot be used, because these commands need the file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = open_store(dataclasses.replace(settings.given(), disable=False))
        health = store.health()
    if health.state == "memory":
        # The error repeats the warning.
        raise StoreError(health.detail or f"store: {store.path} cannot be used")
    for warning in caught:
        warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    return store


def _report(store: Store, absorbed: Absorbed, source: str, json_file: str | None) -> None:
    if json_file != STDOUT:
        click.echo(
            f"{absorbed.total} rows of {source}: {absorbed.added} new, {absorbed.replaced} newer than ours, "
            f"{absorbed.kept} not newer than ours and ignored; store: {store.path}"
        )
    data = {"added": absorbed.added, "replaced": absorbed.replaced, "kept": absorbed.kept}
    write_json(json_file, data | {"store": str(store.path), "source": source})


def _parts(known: list[Known], rows: int) -> Iterator[RenderableType]:
    for fingerprint in dict.fromkeys(k.fingerprint for k in known):
        yield Text(f"\n{machine_text(fingerprint)}", style="bold")
        yield _table([k for k in known if k.fingerprint == fingerprint], rows)


def _tables(facts: Iterable[Ranged]) -> Iterator[RenderableType]:
    """Yield a bar of the segments of each table, under its class of problems."""
    facts = [fact for fact in facts if fact.kind in (TABLE, INVARIANT)]
    for fact in sorted(facts, key=lambda fact: (fact.fingerprint, class_text(fact.key), fact.kind)):
        yield Text(f"\n{class_text(fact.key)}" + ", one choice for every M" * (fact.kind == INVARIANT), style="bold")
        try:
            yield Text("\n".join(table_lines(Segments.of(fact))))
        except (StoreError, InvalidProblemError) as error:
            yield Text(f"  {error}")


def _table(known: list[Known], rows: int) -> TextTable:
    table = TextTable(
        texts=("problem", "choice"),
        numbers=("time µs", "× torch", "right", "failed"),
        last="measured (UTC)",
        optional=("right", "failed", "measured (UTC)"),
    )
    for k in known:
        outcomes, speedup = k.outcomes, k.speedup_over_torch
        latest = max(row.measured_at for row in k.rows)
        first = outcomes[0] if outcomes else None
        cells = (
            textwrap.shorten(problem_text(k.key), PROBLEM_CHARS, placeholder=" …"),
            first.name if first else "none",
            f"{first.time_us:.1f}{busy(first.disturbed)}" if first else "–",
            f"{speedup:.2f}{busy(k.disturbed)}" if speedup else "–",
            str(len(outcomes)),
            str(len(k.rows) - len(outcomes)),
            latest[:16].replace("T", " "),
        )
        table.add_row(*map(Text, cells))
        for outcome in outcomes[1:rows]:
            table.add_row("", Text(outcome.name), f"{outcome.time_us:.1f}{busy(outcome.disturbed)}")
    return table
