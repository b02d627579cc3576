"""Trouble: what an error of the store's file means, and how a corrupt file makes room for a new one."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from ..errors import StoreError
from .database import Database
from .storefile import code_of, file_lock, move_aside

__all__ = ["ELSEWHERE", "FAILURES", "explain", "is_corruption", "set_aside"]

FAILURES = (sqlite3.Error, OSError, StoreError, UnicodeDecodeError)
"""Everything that a use of a Database may raise; the last, when SQLite's message quotes a schema with a flipped bit."""
ELSEWHERE = "or set store_path (GEMMTUNE_STORE_PATH) to another file"

_CORRUPTION = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
)
"""Codes that a whole store of ours cannot give: it has no missing table and no broken constraint either."""


def is_corruption(error: Exception) -> bool:
    """Can the error come from corrupt content?"""
    return isinstance(error, UnicodeDecodeError) or (isinstance(error, sqlite3.DatabaseError) and code_of(error) in _CORRUPTION)


def set_aside(file: Database) -> Path | None:
    """Rename a corrupt file, so that the next use makes a new one; where it is now, or None if another process has done so already.

    Raises:
        one of FAILURES: the file has to stay.
    """
    assert file.path is not None
    file.close()
    with file_lock(file.path, file.busy_timeout_s):
        if not file.path.exists():
            return None
        now = Database(file.path, read_only=True, busy_timeout_s=file.busy_timeout_s)
        try:
            now.check_all()
        except FAILURES as error:
            if not is_corruption(error):
                raise
            now.close()
            return move_aside(file.path)
        finally:
            now.close()
    return None


def explain(path: Path | None, error: Exception) -> str:
    """What happened to the file, what was expected, what to do."""
    if isinstance(error, StoreError):
        return str(error)
    code, system = code_of(error), getattr(error, "errno", 0)
    if code == sqlite3.SQLITE_FULL or system in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "Free some space there"
    elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or isinstance(error, TimeoutError):
        remedy = "End the process that keeps it locked"
    elif is_corruption(error):
        remedy = "Delete it if it is a store"
    elif code == sqlite3.SQLITE_IOERR:
        remedy = "Check the disk and its free space"
    else:
        remedy = "Check its folder and this user's permissions"
    what = str(error) or type(error).__name__
    return f"store: got {what!r} from {path}, expected a store that can be read and written. {remedy}, {ELSEWHERE}."
