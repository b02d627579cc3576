"""Exchange of stores: a store as JSON, and the rows of one store merged into another."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from .. import foreign
from ..errors import StoreError
from ..foreign import parse_json
from ..replacing import write_text
from .database import Database
from .key import canonical, settled_key
from .row import Limit, Ranged, Record, Row, stored_problem

R = TypeVar("R", bound=Record)
KeyedT = TypeVar("KeyedT", Row, Ranged)
FORMAT = "gemmtune-store"
VERSION = 1
MOST_BYTES = 2**30
"""Largest file of ``write_json`` that is read."""
CLOCKS_APART_HOURS = 24
"""Most hours by which the clocks of two machines differ."""
LEAST_TIME_US, MOST_TIME_US = 1e-2, 1e12
"""Times of a call that are possible: from some clock ticks to days."""
LEAST_LIMIT, MOST_GFLOPS = 1e-6, 1e9
"""Rates of a machine that are possible, in 1e9 operations or bytes per second: up to an exaflop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorbed:
    """Numbers of rows that were added, replaced or kept while merging into a store."""

    added: int = 0
    """Rows that were not in the store before."""
    replaced: int = 0
    """Rows measured later than the row in the store, which they replaced."""
    kept: int = 0
    """Rows in the store that were as new or newer and stayed."""

    @property
    def total(self) -> int:
        """Number of all rows that were offered."""
        return self.added + self.replaced + self.kept


def _settled(record: KeyedT) -> KeyedT:
    key = settled_key(record.key)
    return record if key == record.key else dataclasses.replace(record, key=key)


def absorb(database: Database, rows: Iterable[Row], limits: Iterable[Limit], ranged: Iterable[Ranged]) -> Absorbed:
    """Merge rows, limits and records for all M in one transaction. The later of two with one identity stays, unless of the future.

    Raises StoreError, and merges nothing, if one cannot have been measured: see ``check_measured``.
    """
    newest: dict[tuple[str, ...], Row] = {}
    by_date = attrgetter("measured_at")
    rows, ranged = map(_settled, rows), map(_settled, ranged)
    rows, limits, ranged = sorted(rows, key=by_date), sorted(limits, key=by_date), sorted(ranged, key=by_date)
    # Another machine's clock may be ahead.
    latest = (datetime.now(UTC) + timedelta(hours=CLOCKS_APART_HOURS)).isoformat(timespec="microseconds")
    check_measured(rows, limits, ranged, latest)
    taken_limits, taken_ranged = [], []
    with database.transaction():
        present = {r.identity: database.rows(*r.scope).get(r.content_hash) for r in rows}
        for row in rows:
            old = newest.get(row.identity) or present[row.identity]
            if old is None or not row.measured_at <= old.measured_at <= latest:
                newest[row.identity] = row
        for limit in limits:
            there = {x.name: x.measured_at for x in database.limits(limit.fingerprint) if x.measured_at <= latest}
            if limit.measured_at > there.get(limit.name, ""):
                taken_limits.append(limit)
        for fact in ranged:
            found = database.ranged(fact.key, fact.fingerprint)
            known = {x.identity: x.measured_at for x in found if x.measured_at <= latest}
            if fact.measured_at > known.get(fact.identity, ""):
                taken_ranged.append(fact)
        database.write(newest.values(), taken_limits, taken_ranged)
    added = sum(1 for identity in newest if present[identity] is None)
    return Absorbed(added=added, replaced=len(newest) - added, kept=len(rows) - len(newest))


def check_measured(rows: Iterable[Row], limits: Iterable[Limit], ranged: Iterable[Ranged], latest: str) -> None:
    """Raise StoreError for a date after ``latest``, or a time or value beyond any machine, which would win every comparison."""
    for row in rows:
        problem = stored_problem(row.key)
        what = f"{row.name} of {foreign.shorter(str(problem or row.key))}"
        if row.time_us is not None:
            least_us = max(LEAST_TIME_US, problem.flops / MOST_GFLOPS / 1e3 if problem else 0.0)
            if not least_us <= row.time_us <= MOST_TIME_US:
                raise StoreError(
                    f"time_us of {what}: got {row.time_us:g}, expected {least_us:g} to {MOST_TIME_US:g}: no machine takes less; "
                    "measure it again"
                )
        _check_date(what, row.measured_at, latest)
    for limit in limits:
        if not LEAST_LIMIT <= limit.value <= MOST_GFLOPS:
            raise StoreError(f"limit {limit.name}: got {limit.value:g}, expected {LEAST_LIMIT:g} to {MOST_GFLOPS:g}")
        _check_date(f"limit {limit.name}", limit.measured_at, latest)
    for fact in ranged:
        _check_date(f"{fact.kind} of {foreign.shorter(fact.key)}", fact.measured_at, latest)


def _check_date(what: str, measured_at: str, latest: str) -> None:
    if measured_at > latest:
        raise StoreError(
            f"measured_at of {what}: got {measured_at}, expected a time before {latest}: set the clock of the machine that "
            "measured it, and measure it again there"
        )


def to_json(rows: Sequence[Row], limits: Sequence[Limit], ranged: Sequence[Ranged] = ()) -> dict[str, Any]:
    """Return rows, limits and records for all M as plain values. ``measurements`` has a group for each problem and machine."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=attrgetter("key", "fingerprint", "name", "content_hash")):
        groups.setdefault(row.scope, []).append(row.in_group())
    return {
        "format": FORMAT,
        "version": VERSION,
        "measurements": [{"key": key, "fingerprint": machine, "rows": group} for (key, machine), group in groups.items()],
        "limits": [x.to_json() for x in sorted(limits, key=attrgetter("identity"))],
        "ranged": [x.to_json() for x in sorted(ranged, key=attrgetter("identity"))],
    }


def from_json(data: object, source: str) -> tuple[list[Row], list[Limit], list[Ranged]]:
    """Return the values that ``to_json`` wrote. ``ranged`` may be missing, as in files of the first versions.

    Raises StoreError, which names ``source`` and the entry, for any other data.
    """
    top = _object(data, source, ("format", "version", "measurements", "limits"), optional=("ranged",))
    if top["format"] != FORMAT:
        raise StoreError(f"{source}: format: got {top['format']!r}, expected {FORMAT!r}, as gemmtune export writes it")
    if top["version"] != VERSION:
        raise StoreError(
            f"{source}: version: got {top['version']!r}, expected {VERSION}; import it with the gemmtune that wrote it"
        )
    rows: list[Row] = []
    for i, entry in enumerate(_list(top["measurements"], f"{source}: measurements")):
        place = f"{source}: measurements[{i}]"
        group = _object(entry, place, ("key", "fingerprint", "rows"))
        for name in ("key", "fingerprint"):
            _check_canonical(group[name], f"{place}.{name}")
        for j, item in enumerate(_list(group["rows"], f"{place}.rows")):
            try:
                rows.append(Row.of_group(group["key"], group["fingerprint"], _object(item, "")))
            except StoreError as error:
                raise StoreError(f"{place}.rows[{j}]: {str(error).removeprefix(': ')}") from None
    limits = _records(Limit, top["limits"], f"{source}: limits")
    return rows, limits, _records(Ranged, top.get("ranged", []), f"{source}: ranged")


def _records(kind: type[R], data: object, place: str) -> list[R]:
    """Return the records of a list, whose owners are canonical texts."""
    found: list[R] = []
    for i, entry in enumerate(_list(data, place)):
        fields = _object(entry, f"{place}[{i}]")
        for name in kind.OWNER:
            _check_canonical(fields.get(name), f"{place}[{i}].{name}")
        try:
            found.append(kind.from_json(fields))
        except StoreError as error:
            raise StoreError(f"{place}[{i}]: {error}") from None
    return found


def write_json(path: Path, rows: Sequence[Row], limits: Sequence[Limit], ranged: Sequence[Ranged] = ()) -> None:
    """Write ``to_json`` to a file completely or not at all. Raises StoreError if it cannot be written."""
    try:
        write_text(path, json.dumps(to_json(rows, limits, ranged), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise StoreError(f"export: got {error.strerror}, expected a writable file; choose another path than {path}") from error


def read_json(path: Path) -> tuple[list[Row], list[Limit], list[Ranged]]:
    """Read a file with ``from_json``. Raises StoreError if it cannot be read or ``write_json`` did not write it."""
    try:
        data = foreign.read_json(path, most_bytes=MOST_BYTES)
    except OSError as error:
        raise StoreError(f"import: got {error}, expected a readable file written by gemmtune export") from error
    except ValueError as error:
        raise StoreError(f"{path}: got text that is not JSON ({error}), expected a file written by gemmtune export") from error
    return from_json(data, str(path))


def _object(value: object, place: str, fields: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise StoreError(f"{place}: got {foreign.shown(value)}, expected an object" + f" with {', '.join(fields)}" * bool(fields))
    if fields and set(value) - set(optional) != set(fields):
        raise StoreError(
            f"{place}: got an object with {', '.join(sorted(value)) or 'nothing'}, expected one with {', '.join(fields)}"
        )
    return value


def _list(value: object, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise StoreError(f"{place}: got {foreign.shown(value)}, expected a list")
    return value


def _check_canonical(value: object, place: str) -> None:
    """Raise StoreError unless the text is canonical JSON. Texts are compared, so another spelling would never be found."""
    try:
        plain = parse_json(value) if isinstance(value, str) else None
    except ValueError:
        plain = None
    if not isinstance(plain, dict) or canonical(plain) != value:
        raise StoreError(
            f"{place}: got {foreign.shown(value)}, expected the canonical JSON text of an object, as gemmtune export writes it"
        )
