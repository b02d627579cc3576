"""Store of measurements in an SQLite file that many processes share.

An unusable file never stops a tuning: there is one warning, and measurements stay in memory until the process ends. A corrupt
file is renamed, never deleted or overwritten, and a new one begins, because measurements can be repeated.
"""

import atexit
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ..cache import announce, folder_of
from ..errors import StoreError
from ..settings import Settings
from ..warning import warn
from .database import BUSY_TIMEOUT_S, LOCK, Database
from .exchange import Absorbed, absorb, read_json, write_json
from .health import Health, contents, set_aside
from .row import Limit, Ranged, Row
from .storefile import ELSEWHERE, FAILURES, NAME_ANOTHER, explain, is_corruption, read_only_message

__all__ = ["Absorbed", "Health", "Limit", "Ranged", "Row", "Store", "open_store"]

T = TypeVar("T")

_IN_MEMORY = "Until then measurements are kept in memory and lost when this process ends."


class Store:
    """Rows by problem, machine and choice, and limits by machine. It may be used from several threads and across forks."""

    def __init__(self, file: Database | None = None, *, trouble: str = "") -> None:
        """Make a store over a file, or in memory only due to ``trouble``. Use ``open`` or ``open_store`` for files."""
        self._file = file
        self._path = file.path if file else None
        self._memory = Database(None)
        self._trouble = trouble

    @classmethod
    def open(cls, path: Path | str, *, read_only: bool = False, busy_timeout_s: float = BUSY_TIMEOUT_S) -> "Store":
        """Open the store in a file, which is made if it is missing (unless ``read_only``).

        Raises:
            StoreError: the file is missing, corrupt, of a newer version, of another program, or cannot be reached.
        """
        path = Path(path)
        if read_only and not os.path.exists(path):
            raise StoreError(f"store: got {path}, which does not exist, expected a store file of gemmtune")
        file = Database(path, read_only=read_only or _is_read_only(path), busy_timeout_s=busy_timeout_s)
        with LOCK, _said_of(path, NAME_ANOTHER if read_only else ELSEWHERE):
            file.connection()
        return cls(file)

    @property
    def path(self) -> Path | None:
        """File for which the store was opened."""
        return self._path

    @property
    def writable(self) -> bool:
        """True if new rows go into the file."""
        return self._file is not None and not self._file.read_only

    def rows(self, key: str, fingerprint: str) -> dict[str, Row]:
        """Return the rows of a problem (``Problem.key``) on a machine (``key.fingerprint_text``), by content hash. The file
        is read again only after another process has written to it."""
        found = self._read(lambda database: list(database.rows(key, fingerprint).values()))
        return {row.content_hash: row for row in found}

    def every_row(self) -> list[Row]:
        """Return all rows of all problems and machines."""
        return list({row.identity: row for row in self._read(lambda database: list(database.every_row()))}.values())

    def fingerprints(self, key: str) -> list[str]:
        """Return the machines on which a problem was measured, the latest first."""
        return list(dict.fromkeys(self._read(lambda database: database.fingerprints(key))))

    def keys(self, fingerprint: str) -> list[str]:
        """Return the problems that have rows for a machine."""
        return list(dict.fromkeys(self._read(lambda database: database.keys(fingerprint))))

    def digest(self) -> str:
        """Return a digest of what is stored, except limits and ``Ranged.FOR_GRAPHS``. It is equal in every process."""
        return hashlib.sha256("".join(self._read(Database.checksums)).encode()).hexdigest()

    def put(self, rows: Iterable[Row]) -> None:
        """Store rows, replacing those with the same problem, machine and content hash. A kill leaves all or none of them."""
        rows = list(rows)
        if rows:
            self._write(rows, [])

    def limits(self, fingerprint: str) -> dict[str, float]:
        """Return the measured limits of a machine by name, such as ``bandwidth_gbps``."""
        return {limit.name: limit.value for limit in self._read(lambda database: list(database.limits(fingerprint)))}

    def every_limit(self) -> list[Limit]:
        """Return the limits of all machines."""
        return list({x.identity: x for x in self._read(lambda database: list(database.limits()))}.values())

    def put_limits(self, fingerprint: str, limits: Mapping[str, float]) -> None:
        """Store measured limits of a machine, replacing those with the same name."""
        values = [Limit(fingerprint=fingerprint, name=name, value=value) for name, value in limits.items()]
        if values:
            self._write([], values)

    def ranged(self, key: str, fingerprint: str) -> dict[str, Ranged]:
        """Return the facts about a class of problems (``RowClass.key``) on a machine, by kind."""
        return {fact.kind: fact for fact in self._read(lambda database: list(database.ranged(key, fingerprint)))}

    def every_ranged(self) -> list[Ranged]:
        """Return the facts about every class on every machine."""
        return list({fact.identity: fact for fact in self._read(lambda database: list(database.ranged()))}.values())

    def put_ranged(self, fact: Ranged) -> None:
        """Store a fact about all M, replacing one of the same kind."""
        self._write([], [], [fact])

    def export_file(self, path: Path | str, chosen: Callable[[Row | Limit | Ranged], bool] = lambda _: True) -> int:
        """Write the chosen rows, limits and tables to a JSON file and return the number of rows.

        Raises StoreError if the file cannot be written.
        """
        rows = [*filter(chosen, self.every_row())]
        write_json(Path(path), rows, [*filter(chosen, self.every_limit())], [*filter(chosen, self.every_ranged())])
        return len(rows)

    def import_file(self, path: Path | str) -> Absorbed:
        """Merge a file of ``export_file``. If two rows have the same identity, the later measurement stays.

        Raises:
            StoreError: ``export_file`` did not write the file, or this store cannot be written. Nothing is merged then.
        """
        return self.absorb(*read_json(Path(path)))

    def merge(self, path: Path | str) -> Absorbed:
        """Merge another store, whose file is unchanged. If two rows have the same identity, the later measurement stays.

        Raises:
            StoreError: the other file cannot be read, or this store cannot be written. Nothing is merged then.
        """
        other = Store.open(path, read_only=True)._file
        assert other is not None
        with LOCK, _said_of(other.path, NAME_ANOTHER), contextlib.closing(other):
            rows, limits, ranged = list(other.every_row()), list(other.limits()), list(other.ranged())
        return self.absorb(rows, limits, ranged)

    @property
    def state(self) -> str:
        """``file``, ``read-only`` or ``memory``, as in ``Health``. The file is opened, and not read."""
        with LOCK:
            self._with_file(Database.connection, writing=False)
            return "memory" if self._file is None else "file" if self.writable else "read-only"

    @property
    def trouble(self) -> str:
        """Reason why the file is not used, or not written; empty if it is."""
        return self._trouble

    def health(self) -> Health:
        """Check the whole file, which takes as long as reading it. A corrupt file is set aside, as at any use."""
        with LOCK:
            found = self._with_file(contents, writing=False)
            scopes, rows, journal = found if found else contents(self._memory)
            size = os.path.getsize(self._path) if self._path and os.path.exists(self._path) else 0
        return Health(
            path=self._path, state=self.state, detail=self._trouble, scopes=scopes, rows=rows, size_bytes=size, journal_mode=journal
        )

    def close(self) -> None:
        """Close the file, which a later use opens again."""
        with LOCK:
            if self._file:
                self._file.close()

    def _read(self, read: Callable[[Database], list[T]]) -> list[T]:
        """Return the file's contents followed by those in memory."""
        with LOCK:
            return [*(self._with_file(read, writing=False) or []), *read(self._memory)]

    def _write(self, rows: list[Row], limits: list[Limit], ranged: Sequence[Ranged] = ()) -> None:
        def write(database: Database) -> bool:
            with database.transaction():
                database.write(rows, limits, ranged)
            return True

        with LOCK:
            if not self._with_file(write, writing=True):
                write(self._memory)

    def absorb(self, rows: list[Row], limits: list[Limit], ranged: list[Ranged]) -> Absorbed:
        """Merge records of another store. If two rows have the same identity, the later measurement stays.

        Raises:
            StoreError: a record cannot have been measured, or this store cannot be written. Nothing is merged then.
        """
        return self.change(lambda file: absorb(file, rows, limits, ranged))

    def change(self, change: Callable[[Database], T]) -> T:
        """Return the result of a change of the file. Raises StoreError if the store cannot be written."""
        with LOCK:
            if self._file is None or self._file.read_only:
                raise StoreError(self._trouble or read_only_message(self._path))
            with _said_of(self._path):
                return change(self._file)

    def _with_file(self, work: Callable[[Database], T], *, writing: bool) -> T | None:
        """Return the result of ``work`` on the file, or warn and return None if the file cannot be used for it."""
        for first in (True, False):
            if self._file is None:
                return None
            if writing and self._file.read_only:
                self._degrade(read_only_message(self._path))
                return None
            try:
                return work(self._file)
            except FAILURES as error:
                failure = self._set_aside(error) if first and is_corruption(error) and not self._file.read_only else error
                if failure is not None:
                    self._give_up(failure, writing=writing)
                    return None
        return None

    def _give_up(self, error: Exception, *, writing: bool) -> None:
        """Stop using the file, or stop writing to it if it can still be read."""
        assert self._file is not None
        self._file.close()
        readable = self._path is not None and os.path.isfile(self._path) and os.access(self._path, os.R_OK)
        if writing and readable and not isinstance(error, StoreError) and not is_corruption(error):
            self._file.read_only = True
        else:
            self._file = None
        self._degrade(explain(self._path, error))

    def _degrade(self, message: str) -> None:
        """Record the problem, and warn of the first one only: the others follow from it."""
        if not self._trouble:
            self._trouble = message
            warn(f"{message} {_IN_MEMORY}")

    def _set_aside(self, error: Exception) -> Exception | None:
        """Move a corrupt file away and warn about it. Return the error that prevents this, or None."""
        assert self._file is not None
        try:
            moved = set_aside(self._file)
        except FAILURES as second:
            return second
        if moved is not None:
            warn(
                f"store: got a corrupt file at {self._path} ({error}), expected a whole SQLite database. It was renamed to "
                f"{moved}, and a new store has been made. Lost measurements are measured again when they are needed. Delete the "
                "corrupt file when you no longer need it."
            )
        return None


_stores: dict[Path, Store] = {}
_NOTHING = Store()
"""Store of a disabled gemmtune, in which nothing is found."""


def open_store(settings: Settings) -> Store:
    """Return the store of the settings, one for each file and process, or an empty one where they disable gemmtune. An unusable
    file costs one warning, never an error."""
    if settings.disable:
        return _NOTHING
    path = settings.store_file.absolute()
    with LOCK:
        return _stores.get(path) or _stores.setdefault(path, _opened(path, settings))


def _opened(path: Path, settings: Settings) -> Store:
    if settings.store_path is None and (place := folder_of(settings)).untrusted:
        announce(place, settings)
        return Store(trouble=place.advice)
    store = Store(Database(path, read_only=_is_read_only(path)))
    store._with_file(Database.connection, writing=False)
    return store


@atexit.register
def close_stores() -> None:
    """Close every file. The last process that does so moves the journal ``-wal`` into the file, which can then be copied alone."""
    for store in list(_stores.values()):
        store.close()


@contextlib.contextmanager
def _said_of(path: Path | None, elsewhere: str = ELSEWHERE) -> Iterator[None]:
    """Raise a failure of the file in this block as a StoreError that says what to do."""
    try:
        yield
    except FAILURES as error:
        raise StoreError(explain(path, error, elsewhere)) from error


def _is_read_only(path: Path) -> bool:
    return os.path.exists(path) and not (os.access(path, os.W_OK) and os.access(path.absolute().parent, os.W_OK))
