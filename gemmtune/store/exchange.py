"""Exchange of stores: a store as JSON, and the rows of one store merged into another."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from ..errors import StoreError
from .database import Database
from .ranged import Ranged
from .row import Limit, Row

FORMAT = "gemmtune-store"
VERSION = 1


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


def absorb(database: Database, rows: Iterable[Row], limits: Iterable[Limit], ranged: Iterable[Ranged]) -> Absorbed:
    """Merge rows, limits and records for all M into the database in one transaction.

    If two have the same identity, the later measurement stays.
    """
    newest: dict[tuple[str, str, str], Row] = {}
    rows = sorted(rows, key=attrgetter("measured_at"))
    taken_limits, taken_ranged = [], []
    with database.transaction():
        present = {r.identity: database.rows(*r.scope).get(r.content_hash) for r in rows}
        for row in rows:
            old = newest.get(row.identity) or present[row.identity]
            if old is None or old.measured_at < row.measured_at:
                newest[row.identity] = row
        for limit in sorted(limits, key=attrgetter("measured_at")):
            there = {x.name: x.measured_at for x in database.limits(limit.fingerprint)}
            if limit.measured_at > there.get(limit.name, ""):
                taken_limits.append(limit)
        for fact in sorted(ranged, key=attrgetter("measured_at")):
            known = {x.identity: x.measured_at for x in database.ranged(fact.key, fact.fingerprint)}
            if fact.measured_at > known.get(fact.identity, ""):
                taken_ranged.append(fact)
        database.write(newest.values(), taken_limits, taken_ranged)
    added = sum(1 for identity in newest if present[identity] is None)
    return Absorbed(added=added, replaced=len(newest) - added, kept=len(rows) - len(newest))


def to_json(rows: Sequence[Row], limits: Sequence[Limit], ranged: Sequence[Ranged] = ()) -> dict[str, Any]:
    """Return rows, limits and records for all M as plain values. ``measurements`` has a group for each problem and machine."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=attrgetter("key", "fingerprint", "name", "content_hash")):
        groups.setdefault(row.scope, []).append(row.to_json())
    return {
        "format": FORMAT,
        "version": VERSION,
        "measurements": [{"key": key, "fingerprint": machine, "rows": group} for (key, machine), group in groups.items()],
        "limits": [
            {"fingerprint": x.fingerprint, "name": x.name, "value": x.value, "measured_at": x.measured_at}
            for x in sorted(limits, key=attrgetter("fingerprint", "name"))
        ],
        "ranged": [x.to_json() for x in sorted(ranged, key=attrgetter("identity"))],
    }


def from_json(data: object, source: str) -> tuple[list[Row], list[Limit], list[Ranged]]:
    """Return the values that ``to_json`` wrote. ``ranged`` may be missing, as in files of the first versions.

    Raises:
        StoreError: the data differs from the output of ``to_json``. The message names ``source`` and the entry.
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
                rows.append(Row.from_json(group["key"], group["fingerprint"], _object(item, "")))
            except StoreError as error:
                raise StoreError(f"{place}.rows[{j}]: {str(error).removeprefix(': ')}") from None
    limits: list[Limit] = []
    for i, entry in enumerate(_list(top["limits"], f"{source}: limits")):
        place = f"{source}: limits[{i}]"
        fields = _object(entry, place, ("fingerprint", "name", "value", "measured_at"))
        _check_canonical(fields["fingerprint"], f"{place}.fingerprint")
        try:
            limits.append(Limit(**fields))
        except StoreError as error:
            raise StoreError(f"{place}: {error}") from None
    return rows, limits, _ranged_of(top.get("ranged", []), source)


def _ranged_of(data: object, source: str) -> list[Ranged]:
    found: list[Ranged] = []
    for i, entry in enumerate(_list(data, f"{source}: ranged")):
        place = f"{source}: ranged[{i}]"
        fields = _object(entry, place)
        for name in ("key", "fingerprint"):
            _check_canonical(fields.get(name), f"{place}.{name}")
        try:
            found.append(Ranged.from_json(fields))
        except StoreError as error:
            raise StoreError(f"{place}: {error}") from None
    return found


def write_json(path: Path, rows: Sequence[Row], limits: Sequence[Limit], ranged: Sequence[Ranged] = ()) -> None:
    """Write ``to_json`` to a file completely or not at all. Raises StoreError if it cannot be written."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_text(json.dumps(to_json(rows, limits, ranged), indent=1, allow_nan=False) + "\n")
        new.replace(path)
    except OSError as error:
        raise StoreError(f"export: got {error}, expected a writable file; choose another path than {path}") from error


def read_json(path: Path) -> tuple[list[Row], list[Limit], list[Ranged]]:
    """Read a file with ``from_json``. Raises StoreError if it cannot be read or ``write_json`` did not write it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(f"import: got {error}, expected a readable file written by gemmtune export") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: got text that is not JSON ({error}), expected a file written by gemmtune export") from error
    return from_json(data, str(path))


def _object(value: object, place: str, fields: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise StoreError(f"{place}: got {_short(value)}, expected an object" + f" with {', '.join(fields)}" * bool(fields))
    if fields and set(value) - set(optional) != set(fields):
        raise StoreError(
            f"{place}: got an object with {', '.join(sorted(value)) or 'nothing'}, expected one with {', '.join(fields)}"
        )
    return value


def _list(value: object, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise StoreError(f"{place}: got {_short(value)}, expected a list")
    return value


def _check_canonical(value: object, place: str) -> None:
    """Raise StoreError unless the text is canonical JSON.

    Keys and fingerprints are compared as texts, so another spelling would never be found again.
    """
    try:
        plain = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict) or json.dumps(plain, sort_keys=True, separators=(",", ":")) != value:
        raise StoreError(
            f"{place}: got {_short(value)}, expected the canonical JSON text of an object, as gemmtune export writes it"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
