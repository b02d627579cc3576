"""``gemmtune diff``: the picks of two stores or results, problem by problem."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from ..errors import StoreError
from ..selector.result import busy
from ..selector.text_table import NAMES, TextTable, counted
from ..store.exchange import from_json
from ..store.key import canonical
from ..store.store import Row, Store
from ..timing.rounds import BUSY_MARK, tie
from .output import STDOUT, write_json
from .printing import show
from .selection import problem_text
from .stores import Known

PLACE = ("device", "arch", "threads", "timing")
"""Fields of a machine that both sides must share. Versions may differ: their effect is what a comparison shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Pick of a problem in one of two files; ``name`` is None if no choice is correct.

    ``disturbed`` says what disturbed the measurement, "" on a quiet machine.
    """

    name: str | None
    time_us: float | None
    measured_at: str = ""
    disturbed: str = ""


Picks = Mapping[tuple[str, str], Side]
"""Picks by problem and place. The place is empty in results, which name no machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A problem with its pick on both sides, None on a side that lacks it."""

    key: str
    before: Side | None
    after: Side | None

    @property
    def disturbed(self) -> str:
        """The disturbance of one side's measurement, "" if both were quiet."""
        return next((side.disturbed for side in (self.before, self.after) if side is not None and side.disturbed), "")

    @property
    def ratio(self) -> float | None:
        """Time after, divided by the time before."""
        times = [side.time_us if side else None for side in (self.before, self.after)]
        return times[1] / times[0] if times[0] and times[1] else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        sides = {
            name: None if side is None else {"pick": side.name, "time_us": side.time_us, "disturbed": side.disturbed}
            for name, side in (("before", self.before), ("after", self.after))
        }
        return {"problem": {"text": problem_text(self.key)} | json.loads(self.key), **sides, "ratio": self.ratio}


def diff(before: str, after: str, every: bool, json_file: str | None) -> None:
    """Compare two files, each a store, an export of one, or a result of ``tune --json``."""
    left, right = picks_of(Path(before)), picks_of(Path(after))
    if any(not place for _, place in (*left, *right)):
        left, right = _without_places(left), _without_places(right)
    pairs = [Pair(key=scope[0], before=left.get(scope), after=right.get(scope)) for scope in sorted({*left, *right})]
    if json_file != STDOUT:
        show(_parts(pairs, every))
    write_json(json_file, [pair.to_json() for pair in pairs])


def picks_of(path: Path) -> Picks:
    """Return the picks of a file.

    Raises:
        StoreError: it is no store, no export and no result.
        click.ClickException: it cannot be read.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise click.ClickException(f"diff: cannot read {path}: {error.strerror}") from error
    if text.startswith(b"SQLite format 3"):
        return _of_rows(Store.open(path, read_only=True).every_row())
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise StoreError(f"{path}: got no JSON, {_EXPECTED}") from None
    return _of_results(data, path) if isinstance(data, list) else _of_rows(from_json(data, str(path))[0])


_EXPECTED = "expected a store, a file of gemmtune export, or one of gemmtune tune --json"


def _of_rows(rows: Iterable[Row]) -> Picks:
    """Return the picks of rows. The latest machine counts where several share a place."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.scope, []).append(row)
    found: dict[tuple[str, str], Side] = {}
    for (key, machine), group in groups.items():
        first = next(iter(Known(key=key, fingerprint=machine, rows=tuple(group)).outcomes), None)
        latest = max(row.measured_at for row in group)
        side = Side(name=None, time_us=None, measured_at=latest)
        if first is not None:
            side = dataclasses.replace(side, name=first.name, time_us=first.time_us, disturbed=first.disturbed)
        fields = json.loads(machine)
        scope = key, canonical({name: fields.get(name) for name in PLACE})
        if scope not in found or found[scope].measured_at < latest:
            found[scope] = side
    return found


def _of_results(data: list[Any], path: Path) -> Picks:
    found: dict[tuple[str, str], Side] = {}
    try:
        for entry in (x for x in data if "table" not in x):
            problem = {name: value for name, value in entry["problem"].items() if name != "text"}
            times = {choice["name"]: choice["time_us"] for choice in entry["choices"]}
            disturbed = str(entry.get("disturbed") or "")
            found[canonical(problem), ""] = Side(name=entry["pick"], time_us=times.get(entry["pick"]), disturbed=disturbed)
    except (KeyError, TypeError, AttributeError):
        raise StoreError(f"{path}: got another list, {_EXPECTED}") from None
    return found


def _without_places(picks: Picks) -> Picks:
    """Return the latest pick of each problem."""
    ordered = sorted(picks.items(), key=lambda pair: pair[1].measured_at)
    return {(key, ""): side for (key, _), side in ordered}


def _parts(pairs: list[Pair], every: bool) -> Iterator[RenderableType]:
    both = sorted((pair for pair in pairs if pair.ratio), key=lambda pair: -(pair.ratio or 0))
    table = TextTable(texts=("problem", NAMES), numbers=("µs before", "µs after", "ratio"), last="was", optional=("was",))
    for pair in both:
        if (every or _differs(pair)) and pair.before and pair.after:
            was = ("" if pair.before.name == pair.after.name else pair.before.name or "none") + busy(pair.disturbed)
            numbers = (f"{pair.before.time_us:.1f}", f"{pair.after.time_us:.1f}", f"{pair.ratio:.3g}")
            cells = (problem_text(pair.key), pair.after.name or "none", *numbers, was)
            table.add_row(*map(Text, cells), style="red" if (pair.ratio or 0) > 1 + _tie(pair) else None)
    if table.rows:
        yield table
    for name, alone in (("before", [p for p in pairs if p.after is None]), ("after", [p for p in pairs if p.before is None])):
        yield from (Text(f"only {name}: {problem_text(pair.key)}") for pair in alone)
    slower = sum((pair.ratio or 0) > 1 + _tie(pair) for pair in both)
    faster = sum((pair.ratio or 0) < 1 - _tie(pair) for pair in both)
    by = f"by over {tie(''):.0%}" + (f", {tie(BUSY_MARK):.0%} {BUSY_MARK}" if any(pair.disturbed for pair in both) else "")
    yield Text(f"{counted(len(both), 'problem')} on both sides: {slower} slower, {faster} faster {by}", style="bold")


def _differs(pair: Pair) -> bool:
    """Return True for another pick, or a time that differs by more than a tie."""
    other = pair.before is not None and pair.after is not None and pair.before.name != pair.after.name
    return other or abs((pair.ratio or 1) - 1) > _tie(pair)


def _tie(pair: Pair) -> float:
    return tie(pair.disturbed)
