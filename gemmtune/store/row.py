"""Records of a store: measurements, limits, facts for all M, and the checksum that distinguishes a whole one from a corrupt one."""

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, Self

from ..choice import Status
from ..errors import StoreError
from ..foreign import LARGEST_INTEGER, parse_json, shown, visible
from ..problem import Problem
from .key import canonical, now


class Record:
    """Value that SQLite holds as a record: the fields of its OWNER, such as a machine, then those of its COLUMNS."""

    __slots__ = ()
    OWNER: ClassVar[tuple[str, ...]] = ("key", "fingerprint")
    COLUMNS: ClassVar[tuple[str, ...]]
    """Columns, of which the first tells the records of one owner apart."""
    JSON: ClassVar[str] = ""
    """Column that has a mapping, as canonical JSON."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Values for which the store has at most one record."""
        return tuple(getattr(self, name) for name in (*self.OWNER, self.COLUMNS[0]))

    def to_json(self) -> dict[str, Any]:
        """Return plain values of all fields."""
        return {name: getattr(self, name) for name in (*self.OWNER, *self.COLUMNS)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Build the record from the result of ``to_json``. Raises StoreError for a missing, unknown or illegal field."""
        names = (*cls.OWNER, *cls.COLUMNS)
        if set(data) != set(names):
            raise StoreError(f"got fields {', '.join(sorted(data))}, expected {', '.join(names)}")
        return cls(**data)

    @property
    def record(self) -> tuple[Any, ...]:
        """Values of ``COLUMNS`` as SQLite holds them."""
        return tuple(map(_held, (getattr(self, name) for name in self.COLUMNS)))

    @property
    def checksum(self) -> str:
        """Checksum over the record and its owner."""
        return checksum(*(getattr(self, name) for name in self.OWNER), *self.record)

    @classmethod
    def of_record(cls, *values: Any) -> Self | None:
        """Return the value of a whole record, or None if it follows another version's rules. A new measurement replaces it then."""
        fields = dict(zip((*cls.OWNER, *cls.COLUMNS), values, strict=True))
        try:
            return cls(**fields | ({cls.JSON: parse_json(fields[cls.JSON])} if cls.JSON else {}))
        except (StoreError, TypeError, ValueError):
            return None


def _held(value: Any) -> Any:
    if isinstance(value, dict):
        return canonical(value)
    return str(value) if isinstance(value, Status) else int(value) if isinstance(value, bool) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Record):
    """Result of one choice on one problem and one machine.

    (``key``, ``fingerprint``, ``content_hash``) identify it: the canonical texts of the problem and of the machine, and the
    hash of the kernel. ``time_us`` is finite and positive for status ok. It is None for a failure, which has a status and a
    reason. ``error_over_bound`` is None if nothing was verified, and also for failures with an error that is not finite.
    ``info`` holds plain JSON values. Other values (a dtype, an infinity) are kept as text.

    Raises:
        StoreError: a value breaks one of these rules. The message names the field.
    """

    COLUMNS = (
        "content_hash", "name", "backend", "status", "time_us", "error_over_bound", "finalist", "baseline",
        "reason", "info", "measured_at",
    )  # fmt: skip
    JSON = "info"
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
        # A compiler's output may hold bytes that are not text, which SQLite would refuse, and codes that a terminal obeys.
        self._set("reason", visible(str(self.reason)))
        self._set("info", plain(self.info))
        if not isinstance(self.info, dict):
            raise StoreError(f"info of {self.name}: got {shown(self.info)}, expected a mapping of names to plain values")
        check_time_of_day(self.measured_at)
        self._check_figures()

    def _check_figures(self) -> None:
        ok = self.status is Status.OK
        time_us, error = number("time_us", self.time_us), number("error_over_bound", self.error_over_bound)
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
        """Problem and machine, the key of a look-up."""
        return self.key, self.fingerprint

    def in_group(self) -> dict[str, Any]:
        """Return plain values of all fields except key and fingerprint."""
        return {name: getattr(self, name) for name in self.COLUMNS} | {"status": str(self.status)}

    @classmethod
    def of_group(cls, key: object, fingerprint: object, data: Mapping[str, Any]) -> "Row":
        """Build the row from the result of ``in_group``. Raises StoreError for a missing, unknown or illegal field."""
        if wrong := sorted(set(data) ^ set(cls.COLUMNS)):
            raise StoreError(f"got fields that are missing or unknown: {', '.join(wrong)}; expected {', '.join(cls.COLUMNS)}")
        for name in ("finalist", "baseline"):
            if not isinstance(data[name], bool):
                raise StoreError(f"{name}: got {data[name]!r}, expected true or false")
        return cls(key=key, fingerprint=fingerprint, **data)  # type: ignore[arg-type] # __post_init__ checks the types


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit(Record):
    """One measured limit of a machine, such as ``bandwidth_gbps``. Raises StoreError unless it is finite and positive."""

    OWNER = ("fingerprint",)
    COLUMNS = ("name", "value", "measured_at")
    fingerprint: str
    name: str
    value: float
    measured_at: str = field(default_factory=now)

    def __post_init__(self) -> None:
        check_texts(self, "fingerprint", "name")
        value = number(f"limit {self.name}", self.value)
        if value is None or not math.isfinite(value) or value <= 0:
            raise StoreError(f"limit {self.name}: got {self.value!r}, expected a finite number above 0")
        object.__setattr__(self, "value", value)
        check_time_of_day(self.measured_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranged(Record):
    """One fact about a class of problems (``problem.rows.RowClass.key``) on a machine, one of each ``kind`` in the store.

    ``value`` is a mapping of plain values. Raises StoreError if a value breaks a rule.
    """

    COLUMNS = ("kind", "value", "measured_at")
    JSON = "value"
    FOR_GRAPHS = "default_for_graphs"
    """Kind of records that a graph's compilation makes for itself. They are not in the digest, so that the graph keeps its key."""
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


def checksum(*values: Any) -> str:
    """Return a 64-bit checksum of plain values. It detects corruption and does not protect against intent."""
    text = json.dumps(values, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def number(name: str, value: object) -> float | None:
    """Return a number as a float, and None for None. Raises StoreError for other values."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise StoreError(f"{name}: got {shown(value)}, expected a number or nothing")
    try:
        return float(value)
    except OverflowError:
        raise StoreError(f"{name}: got {shown(value)}, expected a number that a float holds") from None


def check_texts(record: object, *names: str) -> None:
    """Raise StoreError unless these fields are nonempty strings of characters that a terminal shows."""
    for name in names:
        value: object = getattr(record, name)
        if not isinstance(value, str) or not value or visible(value) != value:
            raise StoreError(f"{name}: got {shown(value)}, expected a text of at least one character, without control codes")


def plain(value: Any) -> Any:
    """Return the value in JSON's types: nested mappings and sequences, and the text of any other object."""
    match value:
        case None | bool():
            return value
        case str():
            return visible(value)
        case int():
            return value if abs(value) <= LARGEST_INTEGER else str(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {visible(str(k)): plain(v) for k, v in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(v) for v in value]
        case _:
            return str(value)


def check_time_of_day(text: object) -> None:
    """Raise StoreError unless the text is a time in the format of ``now``."""
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() != timedelta(0) or moment.isoformat(timespec="microseconds") != text:
        raise StoreError(f"measured_at: got {shown(text)}, expected a time in UTC such as {now()}")


@functools.lru_cache(maxsize=1024)  # a problem has many rows
def stored_problem(key: str) -> Problem | None:
    """Return the problem with this key, or None if another version wrote it."""
    try:
        return Problem.from_json(parse_json(key))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
