"""File of the store: its schema, its creation, the removal of a corrupt one, and the meaning of its errors."""

import errno
import os
import sqlite3
from pathlib import Path

from ..cache.locking import file_lock, has_locks
from ..errors import StoreError
from ..foreign import text_of

APPLICATION_ID = 0x67656D74
"""``gemt``, which distinguishes our files from other SQLite databases."""
HEAD = b"SQLite format 3\0"
"""First bytes of an SQLite file."""
PAGE_BYTES = 4096
"""Size of the shared memory that SQLite needs at the least to open a store."""
VERSION = 1
"""Version of the schema. A store of a higher version is refused, because this code cannot know what its rows mean."""

RANGED_SCHEMA = """
CREATE TABLE IF NOT EXISTS ranged (
    key TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    kind TEXT NOT NULL,
    value TEXT NOT NULL,
    measured_at TEXT NOT NULL,
    checksum TEXT NOT NULL,
    PRIMARY KEY (key, fingerprint, kind)
) WITHOUT ROWID;"""
"""Table that the first stores of this version lack. It is added when such a file is opened for writing."""

SCHEMA = f"""
BEGIN;
CREATE TABLE scopes (id INTEGER PRIMARY KEY, key TEXT NOT NULL, fingerprint TEXT NOT NULL, UNIQUE (key, fingerprint));
CREATE TABLE measurements (
    scope INTEGER NOT NULL REFERENCES scopes (id),
    content_hash TEXT NOT NULL,
    name TEXT NOT NULL,
    backend TEXT NOT NULL,
    status TEXT NOT NULL,
    time_us REAL,
    error_over_bound REAL,
    finalist INTEGER NOT NULL,
    baseline INTEGER NOT NULL,
    reason TEXT NOT NULL,
    info TEXT NOT NULL,
    measured_at TEXT NOT NULL,
    checksum TEXT NOT NULL,
    PRIMARY KEY (scope, content_hash)
) WITHOUT ROWID;
CREATE TABLE limits (
    fingerprint TEXT NOT NULL,
    name TEXT NOT NULL,
    value REAL NOT NULL,
    measured_at TEXT NOT NULL,
    checksum TEXT NOT NULL,
    PRIMARY KEY (fingerprint, name)
) WITHOUT ROWID;
{RANGED_SCHEMA}
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
COMMIT;
"""

_NETWORK_FILE_SYSTEMS = (
    "nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "fuse.", "glusterfs", "pvfs", "orangefs",
)  # fmt: skip
_DATABASE_SUFFIXES = (".sqlite", ".sqlite3", ".db")
_JOURNALS = ("-wal", "-shm", "-journal")

FAILURES = (sqlite3.Error, OSError, StoreError, UnicodeDecodeError)
"""Exceptions of a Database, UnicodeDecodeError among them where SQLite quotes a schema with a flipped bit."""
ELSEWHERE = "or set store_path (GEMMTUNE_STORE_PATH) to another file"
NAME_ANOTHER = "or name another file"
"""Remedy for a file that was named for reading instead of coming from the settings."""

_CORRUPTION = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
)
"""Codes that an undamaged store cannot give, because it has no missing table and no broken constraint."""


def connect(name: str, busy_timeout_s: float) -> sqlite3.Connection:
    """Return a connection to a ``file:`` address or ``:memory:``, usable from every thread that holds ``database.LOCK``."""
    connection = sqlite3.connect(name, timeout=busy_timeout_s, uri=True, isolation_level=None, check_same_thread=False)
    # The checksum finds a damaged text, which must not end a query in the middle.
    connection.text_factory = lambda data: data.decode(errors="replace")
    return connection


def code_of(error: BaseException) -> int:
    """Return SQLite's primary result code of an error, or 0 if the error does not come from SQLite."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def is_corruption(error: Exception) -> bool:
    """Return True if the error can come from corrupt content."""
    return isinstance(error, UnicodeDecodeError) or (isinstance(error, sqlite3.DatabaseError) and code_of(error) in _CORRUPTION)


def corrupt(what: str) -> sqlite3.DatabaseError:
    """Return the error of a file in which gemmtune, not SQLite, found damage."""
    error = sqlite3.DatabaseError(what)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Raise StoreError unless gemmtune made the file and this version can read it."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise StoreError(
            f"store: got {path}, an SQLite database of another program, expected one of gemmtune. "
            "Set store_path (GEMMTUNE_STORE_PATH) to another file."
        )
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise StoreError(
            f"store: got schema version {version} in {path}, expected at most {VERSION}: a newer gemmtune wrote it. "
            "Upgrade gemmtune, or set store_path (GEMMTUNE_STORE_PATH) to another file."
        )


def create(path: Path, busy_timeout_s: float) -> None:
    """Make an empty store unless there is a file at the path. It is complete before it gets its name, whoever else makes one.

    Raises OSError if folder or file cannot be made, sqlite3.Error if SQLite cannot write it, as without free space.
    """
    if path.exists() and not path.is_file():
        raise StoreError(
            f"store: got {path}, a device, pipe or folder, expected a file. Set store_path (GEMMTUNE_STORE_PATH) to another file."
        )
    if _has_content(path):
        return
    with file_lock(Path(f"{path}.lock"), busy_timeout_s):
        if _has_content(path):
            return
        new = path.with_name(f"{path.name}.new-{os.getpid()}")
        new.unlink(missing_ok=True)
        connection = connect(new.as_uri(), busy_timeout_s)
        try:
            # Before WAL: closing such a file says nothing if a full disk keeps tables in the journal.
            connection.executescript(SCHEMA)
            # WAL: readers never wait, and a commit need not wait for the disk to survive a kill. It needs memory that all
            # users of the file share, which the hosts of a network file system do not have.
            if not _on_network(path.parent):
                connection.execute("PRAGMA journal_mode = WAL")
            connection.close()
            for leftover in _JOURNALS:
                # The journal of a deleted file would be replayed into the new one.
                path.with_name(path.name + leftover).unlink(missing_ok=True)
            new.replace(path)
        finally:
            connection.close()
            for end in ("", *_JOURNALS):  # those of a store that a full disk ended would stay, a set for each process
                new.with_name(new.name + end).unlink(missing_ok=True)


def move_aside(path: Path) -> Path:
    """Rename a corrupt store and journals to the first free ``<name>.corrupt-<n>``, under ``file_lock``.

    Raises StoreError if the name is not a database's, so that a wrong setting moves no other file.
    """
    if path.suffix not in _DATABASE_SUFFIXES:
        raise StoreError(
            f"store: got {path}, which is not an SQLite database, expected a name that ends with one of "
            f"{', '.join(_DATABASE_SUFFIXES)}. Set store_path (GEMMTUNE_STORE_PATH) to another file."
        )
    number = 1
    while any(path.with_name(f"{path.name}.corrupt-{number}{end}").exists() for end in ("", "-wal")):
        number += 1
    moved = path.with_name(f"{path.name}.corrupt-{number}")
    # Journals come first: after a kill, one left here would be replayed into the next database of this name.
    for end in (*_JOURNALS, ""):
        part = path.with_name(path.name + end)
        if part.exists():
            part.replace(moved.with_name(moved.name + end))
    return moved


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _on_network(folder: Path) -> bool:
    """Return True if Linux's list of mounts shows the folder on a file system that several hosts can write."""
    target = os.path.realpath(folder)
    kinds: dict[str, str] = {}
    for line in text_of("/proc/self/mounts").splitlines():
        _, mount, kind, *_ = line.split(" ")
        kinds[mount.replace("\\040", " ")] = kind
    best = max((m for m in kinds if target == m or target.startswith(m.rstrip("/") + "/")), key=len, default="")
    return kinds.get(best, "").startswith(_NETWORK_FILE_SYSTEMS)


def is_full(folder: Path) -> bool:
    """Return True if the file system of a folder has no room for another page of a store. A missing folder is not full."""
    if not folder.is_dir():
        return False
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize < PAGE_BYTES


def explain(path: Path | None, error: Exception, elsewhere: str = ELSEWHERE) -> str:
    """Return a message that says what happened to the file, what was expected and what to do."""
    if isinstance(error, StoreError):
        return str(error)
    code, system = code_of(error), getattr(error, "errno", None)
    if code == sqlite3.SQLITE_FULL or system in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "Free some space there"
    elif system == errno.ENOLCK:
        remedy = "Use a local file system"
    elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or isinstance(error, TimeoutError):
        remedy = "End the process that keeps it locked"
    elif is_corruption(error):
        remedy = "Delete it if it is a store"
    elif code == sqlite3.SQLITE_IOERR:
        remedy = "Check the disk and its free space"
    else:
        remedy = "Check its folder and this user's permissions"
    what = str(error) or type(error).__name__
    return f"store: got {what!r} from {path}, expected a store that can be read and written. {remedy}, {elsewhere}."


def read_only_message(path: Path | None) -> str:
    """Return a message for a store that cannot be written: what was got, what is expected, and a remedy."""
    if path is not None and not has_locks(path.parent):
        expected, remedy = "a file system with locks", "Use a local file system"
    elif path is not None and is_full(path.parent):
        expected, remedy = "free space there", "Free some space"
    else:
        expected, remedy = "a writable file in a writable folder", "Give this user permission for both"
    return f"store: got {path}, which can be read but not written, expected {expected}. {remedy}, {ELSEWHERE}."
