"""Ranged: a stored fact about all problems that differ in M alone, such as their table of segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import StoreError
from ..foreign import parse_json, shown
from .key import canonical, now
from .row import check_texts, check_time_of_day, checksum, plain

COLUMNS = ("kind", "value", "measured_at")
"""Columns of a record, without the class and the machine that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranged:
    """One fact about a class of problems (``problem.rows.RowClass.key``) on a machine, one of each ``kind`` in the store.

    ``value`` is a mapping of plain values. Raises StoreError if a value breaks a rule.
    """

    key: str
    fingerprint: str
    kind: str
    value: dict[str, Any] = field(hash=False)
    measured_at: str = field(default_factory=now)

    def __post_init__(self) -> None:
        check_texts(self, "key", "fingerprint", "kind")
        object.__setattr__(self, "value", plain(self.value))
        if not isinstance(self.value, dict):
            raise StoreError(f"{self.kind}: got {shown(self.value)}, expected a mapping of names to plain values")
        check_time_of_day(self.measured_at)

    @property
    def identity(self) -> tuple[str, str, str]:
        """Class, machine and kind, for which the store has at most one record."""
        return self.key, self.fingerprint, self.kind

    @property
    def record(self) -> tuple[str, ...]:
        """Values of ``COLUMNS`` as SQLite holds them."""
        return self.kind, canonical(self.value), self.measured_at

    @property
    def checksum(self) -> str:
        """Checksum over the record and its class and machine."""
        return checksum(self.key, self.fingerprint, *self.record)

    @classmethod
    def of_record(cls, key: str, fingerprint: str, kind: str, value: str, measured_at: str) -> Ranged | None:
        """Return the fact of a whole record, or None if it breaks this version's rules."""
        try:
            return cls(key=key, fingerprint=fingerprint, kind=kind, value=parse_json(value), measured_at=measured_at)
        except (StoreError, TypeError, ValueError):
            return None

    def to_json(self) -> dict[str, Any]:
        """Return plain values of every field."""
        return {"key": self.key, "fingerprint": self.fingerprint, **{name: getattr(self, name) for name in COLUMNS}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ranged:
        """Build the fact from the result of ``to_json``. Raises StoreError for a missing, unknown or illegal field."""
        names = ("key", "fingerprint", *COLUMNS)
        if set(data) != set(names):
            raise StoreError(f"got fields {', '.join(sorted(data))}, expected {', '.join(names)}")
        return cls(**data)
