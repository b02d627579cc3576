"""Database: the store's tables in a file or in memory. Errors of sqlite3 and the system pass through to ``store.py``."""

import contextlib
import errno
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ..cache import make_private
from ..cache.locking import has_locks
from .key import may_be_unsettled, settled_key
from .row import Limit, Ranged, Record, Row, checksum
from .storefile import RANGED_SCHEMA, SCHEMA, check, code_of, connect, corrupt, create, is_full

R = TypeVar("R", bound=Record)
BUSY_TIMEOUT_S = 30.0
"""Longest wait for other writers: far more than any of ours takes, because a transaction writes the rows of one problem."""

LOCK = threading.RLock()
"""Lock that is held while a database is used: threads share its connection, and no fork copies it during a use."""
os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)

_of_parents: list[sqlite3.Connection] = []
"""Connections that a fork left in this process. SQLite allows neither their use nor their closing here."""

_SELECT = (
    f"{', '.join('m.' + column for column in Row.COLUMNS)}, m.checksum FROM measurements AS m JOIN scopes AS s ON s.id = m.scope"
)
_SELECT_RANGED, _SELECT_LIMITS = (
    f"SELECT {', '.join((*kind.OWNER, *kind.COLUMNS))}, checksum FROM {table}"
    for kind, table in ((Ranged, "ranged"), (Limit, "limits"))
)


def _upsert(table: str, columns: Sequence[str]) -> str:
    return f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


_UPSERT = _upsert("measurements", ("scope", *Row.COLUMNS, "checksum"))
_UPSERT_RANGED = _upsert("ranged", (*Ranged.OWNER, *Ranged.COLUMNS, "checksum"))
_UPSERT_LIMIT = _upsert("limits", (*Limit.OWNER, *Limit.COLUMNS, "checksum"))


def _whole(kind: type[R], name: str, *values: Any) -> R | None:
    """Return the value of a record that ends with its checksum. Raise an error of corruption if the checksum is another one."""
    *record, found = values
    if checksum(*record) != found:
        raise corrupt(f"{name} does not match its checksum")
    return kind.of_record(*record)


class Database:
    """Tables in one SQLite file, or in memory if ``path`` is None.

    The file is opened at the first use. It is opened again when needed: after a fork, or when the file was replaced. Every
    method may raise sqlite3.Error or OSError, and StoreError for a whole file that gemmtune must not use. Callers hold
    ``LOCK``.
    """

    def __init__(self, path: Path | None, *, read_only: bool = False, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self.path = path.absolute() if path else None
        self.read_only = read_only
        self.busy_timeout_s = busy_timeout_s
        self._connection: sqlite3.Connection | None = None
        self._opened_as: tuple[int, ...] = ()
        self._data_version: int | None = None
        self._cache: dict[tuple[str, str], dict[str, Row]] = {}
        self._has_ranged = True
        self._former: dict[str, list[str]] | None = None

    def connection(self) -> sqlite3.Connection:
        """Return this process's connection to the file now at the path, or to the file of the running transaction."""
        if self._connection is not None and not self._connection.in_transaction and self._opened_as != self._identity():
            self.close()
        if self._connection is None:
            self._connection = self._connect()
            self._opened_as = self._identity()
        return self._connection

    def close(self) -> None:
        """Close the file, which the next use opens again. A database in memory keeps its contents."""
        if self._connection is None or self.path is None:
            return
        if self._opened_as[0] == os.getpid():
            self._connection.close()
        else:
            _of_parents.append(self._connection)
        self._connection = None
        self._data_version = None
        self._former = None
        self._cache.clear()

    def _identity(self) -> tuple[int, ...]:
        """Return the process and file for which a connection is valid. Memory needs none, because a fork copies it."""
        if self.path is None:
            return ()
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return (os.getpid(),)
        return os.getpid(), stat.st_dev, stat.st_ino

    def _connect(self) -> sqlite3.Connection:
        if self.path is None:
            connection = connect(":memory:", self.busy_timeout_s)
            connection.executescript(SCHEMA)
            return connection
        if not self.read_only:
            make_private(self.path.parent)
            if has_locks(self.path.parent):
                create(self.path, self.busy_timeout_s)
            elif self.path.exists():  # otherwise SQLite would wait for a lock until its time-out
                self.read_only = True
                return self._opened(self.path, "immutable=1")
            else:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        try:
            return self._opened(self.path, "mode=ro" if self.read_only else "mode=rw")
        except sqlite3.OperationalError as error:
            denied = self.read_only and code_of(error) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
            without_space = code_of(error) in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL) and is_full(self.path.parent)
            if not (denied or without_space) or not os.access(self.path, os.R_OK):
                raise
            # Users of a WAL file write to its shared memory. Where they cannot, the file can only be read as immutable.
            self.read_only = True
            return self._opened(self.path, "immutable=1")

    def _opened(self, path: Path, mode: str) -> sqlite3.Connection:
        connection = connect(f"{path.as_uri()}?{mode}", self.busy_timeout_s)
        try:
            check(connection, path)
            connection.execute(f"SELECT {_SELECT} LIMIT 0")
            connection.execute(f"{_SELECT_LIMITS} LIMIT 0")
            # Uncommitted pages survive a kill in WAL mode. Without WAL a power cut could leave a torn file.
            (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
            found = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'ranged'").fetchone() is not None
            if not found and mode == "mode=rw":  # an early store of this version
                connection.executescript(RANGED_SCHEMA)
            self._has_ranged = found or mode == "mode=rw"
            connection.execute(f"PRAGMA synchronous = {'NORMAL' if journal == 'wal' else 'FULL'}")
        except BaseException:
            connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Open a transaction that has the write lock from its start: all of it is kept, or nothing."""
        connection = self.connection()
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            self._cache.clear()
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def rows(self, key: str, fingerprint: str) -> dict[str, Row]:
        """Return a problem's rows on a machine by content hash, cached until another connection writes."""
        connection = self.connection()
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if version != self._data_version:
            self._cache.clear()
            self._data_version = version
        scope = (key, fingerprint)
        if scope not in self._cache:
            rows: dict[str, Row] = {}
            for name in self._names(key):
                records = connection.execute(f"SELECT {_SELECT} WHERE s.key = ? AND s.fingerprint = ?", (name, fingerprint))
                # The checksum covers the requested key, so a damaged file cannot return another problem's row.
                found = (_whole(Row, "a measurement", name, fingerprint, *record) for record in records)
                rows |= {row.content_hash: replace(row, key=key) for row in found if row is not None}
            self._cache[scope] = rows
        return self._cache[scope]

    def _names(self, key: str) -> list[str]:
        """Return the keys under which a problem may be stored, its own last. Earlier versions kept strides that mean nothing."""
        if not may_be_unsettled(key):
            return [key]
        if self._former is None:
            self._former = {}
            tables = ("scopes", *(("ranged",) if self._has_ranged else ()))
            keys = " UNION ".join(f"SELECT key FROM {table}" for table in tables)
            for (name,) in self.connection().execute(keys):
                if (settled := settled_key(name)) != name:
                    self._former.setdefault(settled, []).append(name)
        return [*self._former.get(key, ()), key]

    def every_row(self) -> Iterator[Row]:
        """Yield all rows, problem by problem."""
        records = self.connection().execute(f"SELECT s.key, s.fingerprint, {_SELECT} ORDER BY m.scope")
        yield from (row for record in records if (row := _whole(Row, "a measurement", *record)) is not None)

    def fingerprints(self, key: str) -> list[str]:
        """Return the machines that have rows for a problem, with the machine of the newest row first."""
        query = (
            "SELECT s.fingerprint FROM scopes AS s JOIN measurements AS m ON m.scope = s.id WHERE s.key = ? "
            "GROUP BY s.id ORDER BY MAX(m.measured_at) DESC, s.fingerprint"
        )
        return [fingerprint for (fingerprint,) in self.connection().execute(query, (key,))]

    def keys(self, fingerprint: str) -> list[str]:
        """Return the problems that have rows for a machine."""
        return [str(key) for (key,) in self.connection().execute("SELECT key FROM scopes WHERE fingerprint = ?", (fingerprint,))]

    def limits(self, fingerprint: str | None = None) -> Iterator[Limit]:
        """Yield the limits of one machine, or of all."""
        where, values = (" WHERE fingerprint = ?", (fingerprint,)) if fingerprint is not None else ("", ())
        for machine, *record in self.connection().execute(_SELECT_LIMITS + where, values):
            limit = _whole(Limit, "a measured limit", fingerprint or machine, *record)
            if limit is not None:
                yield limit

    def ranged(self, key: str | None = None, fingerprint: str | None = None) -> Iterator[Ranged]:
        """Yield the records for all M, of one class on one machine, or of all."""
        connection = self.connection()
        if not self._has_ranged:
            return
        scopes = (
            [("", ())]
            if key is None
            else [(" WHERE key = ? AND fingerprint = ?", (name, fingerprint)) for name in self._names(key)]
        )
        for where, values in scopes:
            for record in connection.execute(_SELECT_RANGED + where, values):
                fact = _whole(Ranged, "a record for all M", *record)
                if fact is not None:
                    yield fact if key is None else replace(fact, key=key)

    def checksums(self) -> list[str]:
        """Return the checksums of measurements, and of records for all M except ``Ranged.FOR_GRAPHS``, sorted within each table."""
        records = (("ranged WHERE kind != ?", (Ranged.FOR_GRAPHS,)),) if self._has_ranged else ()
        return [
            str(checksum)
            for table, values in (("measurements", ()), *records)
            for (checksum,) in self.connection().execute(f"SELECT checksum FROM {table} ORDER BY checksum", values)
        ]

    def write(self, rows: Iterable[Row], limits: Iterable[Limit] = (), ranged: Iterable[Ranged] = ()) -> None:
        """Write rows, limits and records for all M, replacing those with the same identity. Call inside ``transaction``."""
        connection = self.connection()
        for row in rows:
            connection.execute(_UPSERT, (self._scope(*row.scope), *row.record, row.checksum))
            self._cache.pop(row.scope, None)
        for limit in limits:
            connection.execute(_UPSERT_LIMIT, (limit.fingerprint, *limit.record, limit.checksum))
        for fact in ranged:
            connection.execute(_UPSERT_RANGED, (fact.key, fact.fingerprint, *fact.record, fact.checksum))

    def remove(self, rows: Iterable[Row], limits: Iterable[Limit], ranged: Iterable[Ranged]) -> None:
        """Remove records that were read before, and problems without rows. What was measured again since then stays."""
        scope = "(SELECT id FROM scopes WHERE key = ? AND fingerprint = ?)"
        places = (
            (f"measurements WHERE scope = {scope} AND content_hash = ?", rows),
            ("limits WHERE fingerprint = ? AND name = ?", limits),
            ("ranged WHERE key = ? AND fingerprint = ? AND kind = ?", ranged),
        )
        with self.transaction():
            connection = self.connection()
            for place, records in places:
                values = ((*x.identity, x.measured_at) for x in records)
                connection.executemany(f"DELETE FROM {place} AND measured_at = ?", values)
            connection.execute("DELETE FROM scopes WHERE id NOT IN (SELECT scope FROM measurements)")
            self._cache.clear()

    def _scope(self, key: str, fingerprint: str) -> int:
        connection = self.connection()
        found = connection.execute("SELECT id FROM scopes WHERE key = ? AND fingerprint = ?", (key, fingerprint)).fetchone()
        if found is None:
            query = "INSERT INTO scopes (key, fingerprint) VALUES (?, ?) RETURNING id"
            found = connection.execute(query, (key, fingerprint)).fetchone()
        return int(found[0])

    def scopes(self) -> int:
        """Return the number of problems, counted once for each machine."""
        (scopes,) = self.connection().execute("SELECT COUNT(*) FROM scopes").fetchone()
        return int(scopes)

    def pragma(self, name: str) -> str:
        """Return the answer of an SQLite PRAGMA such as ``journal_mode``, with its lines joined."""
        return "; ".join(str(line[0]) for line in self.connection().execute(f"PRAGMA {name}"))
