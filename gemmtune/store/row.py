"""Row: one stored measurement, and the checksum that tells a whole record from a corrupt one."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any

from ..choice import Status
from ..errors import StoreError
from .key import canonical, now


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one choice fared on one problem, on one machine.

    (``key``, ``fingerprint``, ``content_hash``) identify it: the canonical texts of the problem and of the machine, and the hash
    over the kernel. ``time_us`` is finite and positive for status ok, None for a failure: a failure has a status and a reason,
    never an infinite time. ``error_over_bound`` is None where nothing was verified, and for failures also where the error is not
    finite. ``info`` holds plain JSON values; what is none (a dtype, an infinity) is kept as its text.

    Raises:
        StoreError: a value that is not as said here; the message names the field.
    """

    key: str
    fingerprint: str
    name: str
    backend: str
    content_hash: str
    status: Status
    time_us: float | None = None
    error_over_bound: float | None = None
    finalist: bool = False
    baseline: bool = False
    reason: str = ""
    info: dict[str, Any] = field(default_factory=dict, hash=False)
    measured_at: str = field(default_factory=now)
    """UTC, ISO 8601 with microseconds."""

    def __post_init__(self) -> None:
        check_texts(self, "key", "fingerprint", "name", "backend", "content_hash")
        try:
            self._set("status", Status(self.status))
        except ValueError:
            raise StoreError(f"status: got {self.status!r}, expected one of {', '.join(Status)}") from None
        self._set("finalist", bool(self.finalist))
        self._set("baseline", bool(self.baseline))
        # What a compiler printed may hold bytes that are no text; SQLite would refuse the row.
        self._set("reason", str(self.reason).encode("utf-8", "replace").decode())
        self._set("info", plain(self.info))
        if not isinstance(self.info, dict):
            raise StoreError(f"info of {self.name}: got {self.info!r}, expected a mapping of names to plain values")
        check_time_of_day(self.measured_at)
        self._check_figures()

    def _check_figures(self) -> None:
        ok = self.status is Status.OK
        time_us, error = _number("time_us", self.time_us), _number("error_over_bound", self.error_over_bound)
        if ok and (time_us is None or not math.isfinite(time_us) or time_us <= 0):
            raise StoreError(f"time_us of {self.name}: got {self.time_us!r} with status ok, expected a finite number above 0")
        if not ok and time_us is not None:
            raise StoreError(
                f"time_us of {self.name}: got {self.time_us!r} with status {self.status}, expected None: failures have no time"
            )
        if error is not None and not (math.isfinite(error) and error >= 0):
            if ok:
                raise StoreError(
                    f"error_over_bound of {self.name}: got {error!r} with status ok, expected a finite number of at least 0"
                )
            error = None
        self._set("time_us", time_us)
        self._set("error_over_bound", error)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def scope(self) -> tuple[str, str]:
        """Problem and machine: what a look-up asks for."""
        return self.key, self.fingerprint

    @property
    def identity(self) -> tuple[str, str, str]:
        """What the store has at most one row for."""
        return self.key, self.fingerprint, self.content_hash

    @property
    def record(self) -> tuple[Any, ...]:
        """The values of ``COLUMNS`` as SQLite holds them."""
        return (
            self.content_hash, self.name, self.backend, str(self.status), self.time_us, self.error_over_bound,
            int(self.finalist), int(self.baseline), self.reason, canonical(self.info), self.measured_at,
        )  # fmt: skip

    @property
    def checksum(self) -> str:
        """A checksum over the record and what it belongs to."""
        return checksum(*self.scope, *self.record)

    @classmethod
    def of_record(cls, key: str, fingerprint: str, record: Sequence[Any]) -> Row | None:
        """The row of a whole record; None if a version with other rules wrote it, of no use here: a new measurement replaces it."""
        values = dict(zip(COLUMNS, record, strict=True))
        values["info"] = json.loads(values["info"])
        try:
            return cls(key=key, fingerprint=fingerprint, **values)
        except StoreError:
            return None

    def to_json(self) -> dict[str, Any]:
        """Plain values of everything but key and fingerprint."""
        return {name: getattr(self, name) for name in COLUMNS} | {"status": str(self.status)}

    @classmethod
    def from_json(cls, key: object, fingerprint: object, data: Mapping[str, Any]) -> Row:
        """The inverse of ``to_json``. Raises StoreError for a missing, unknown or illegal field."""
        if wrong := sorted(set(data) ^ set(COLUMNS)):
            raise StoreError(f"got fields that are missing or unknown: {', '.join(wrong)}; expected {', '.join(COLUMNS)}")
        for name in ("finalist", "baseline"):
            if not isinstance(data[name], bool):
                raise StoreError(f"{name}: got {data[name]!r}, expected true or false")
        return cls(key=key, fingerprint=fingerprint, **data)  # type: ignore[arg-type] # __post_init__ checks the types


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One measured limit of a machine, such as ``bandwidth_gbps``. Raises StoreError unless the value is finite and positive."""

    fingerprint: str
    name: str
    value: float
    measured_at: str = field(default_factory=now)

    def __post_init__(self) -> None:
        check_texts(self, "fingerprint", "name")
        value = _number(f"limit {self.name}", self.value)
        if value is None or not math.isfinite(value) or value <= 0:
            raise StoreError(f"limit {self.name}: got {self.value!r}, expected a finite number above 0")
        object.__setattr__(self, "value", value)
        check_time_of_day(self.measured_at)

    @property
    def record(self) -> tuple[Any, ...]:
        """The values of ``LIMIT_COLUMNS`` as SQLite holds them."""
        return self.name, self.value, self.measured_at

    @property
    def checksum(self) -> str:
        """A checksum over the record and the machine that it belongs to."""
        return checksum(self.fingerprint, *self.record)


COLUMNS: tuple[str, ...] = (
    "content_hash", "name", "backend", "status", "time_us", "error_over_bound", "finalist", "baseline",
    "reason", "info", "measured_at",
)  # fmt: skip
"""The fields of a Row apart from key and fingerprint, in the order of its record."""
LIMIT_COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Limit) if f.name != "fingerprint")


def checksum(*values: Any) -> str:
    """64 bits over plain values, enough to tell a corrupt record from a whole one; no protection against intent."""
    text = json.dumps(values, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _number(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise StoreError(f"{name}: got {value!r}, expected a number or nothing")
    return float(value)


def check_texts(record: object, *names: str) -> None:
    """Raises StoreError unless these fields are strings that UTF-8 can carry, and not empty."""
    for name in names:
        value: object = getattr(record, name)
        if not isinstance(value, str) or not value or value.encode(errors="replace").decode() != value:
            raise StoreError(f"{name}: got {value!r}, expected a text of at least one character")


def plain(value: Any) -> Any:
    """The value as JSON has it: mappings and sequences all the way down, and the text of whatever JSON lacks."""
    match value:
        case None | bool() | str():
            return value
        case int() | float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(k): plain(v) for k, v in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(v) for v in value]
        case _:
            return str(value)


def check_time_of_day(text: object) -> None:
    """Raises StoreError unless the text is a time as ``now`` writes it."""
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() != timedelta(0) or moment.isoformat(timespec="microseconds") != text:
        raise StoreError(f"measured_at: got {text!r}, expected a time in UTC such as {now()}")
