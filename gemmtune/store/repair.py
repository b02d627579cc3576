"""Repair: what an error of the store's file means, and how a damaged file is replaced without losing what can be read of it."""

from __future__ import annotations

import errno
import functools
import logging
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import StoreError
from .database import Database
from .exchange import absorb
from .row import Limit, Row
from .storefile import code_of, file_lock, move_aside

__all__ = ["ELSEWHERE", "FAILURES", "Repaired", "explain", "is_damage", "repair"]

T = TypeVar("T")

log = logging.getLogger("gemmtune")

FAILURES = (sqlite3.Error, OSError, StoreError, UnicodeDecodeError)
"""Everything that a use of a Database may raise; the last, when SQLite's message quotes a schema with a flipped bit."""
ELSEWHERE = "or set store_path (GEMMTUNE_STORE_PATH) to another file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What was done: where the damaged file is now (None if another process had replaced it already), and how many rows it gave."""

    moved_to: Path | None
    saved_rows: int


def is_damage(error: Exception) -> bool:
    """Can the error come from damaged content? A whole store of ours has no missing table and no broken constraint either."""
    damage = (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
    )
    return isinstance(error, UnicodeDecodeError) or (isinstance(error, sqlite3.DatabaseError) and code_of(error) in damage)


def repair(file: Database) -> Repaired | None:
    """Put a damaged file aside and start a new one with every row that can still be read; None if the file has to stay.

    Raises:
        one of FAILURES: the new file cannot be made or written.
    """
    assert file.path is not None
    file.close()
    with file_lock(file.path, file.busy_timeout_s):
        if not _is_broken(file.path, file.busy_timeout_s):
            return Repaired(moved_to=None, saved_rows=0)
        moved = move_aside(file.path)
    if moved is None:
        return None
    rows, limits = _salvage(moved)
    absorb(file, rows, limits)
    return Repaired(moved_to=moved, saved_rows=len(rows))


def _is_broken(path: Path, busy_timeout_s: float) -> bool:
    if not path.exists():
        return False
    file = Database(path, read_only=True, busy_timeout_s=busy_timeout_s)
    try:
        return file.pragma("integrity_check(1)") != "ok"
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        if not is_damage(error):
            raise
        return True
    finally:
        file.close()


def _salvage(path: Path) -> tuple[list[Row], list[Limit]]:
    """The whole rows of a damaged file, problem by problem, and its limits, as far as they can be read."""
    file = Database(path, read_only=True, tolerant=True)
    rows: list[Row] = []
    for scope in _readable(file.scopes):
        rows += _readable(functools.partial(file.rows_of, *scope))
    limits = _readable(file.limits)
    file.close()
    return rows, limits


def _readable(read: Callable[[], Iterable[T]]) -> list[T]:
    try:
        return list(read())
    except FAILURES as error:
        log.debug("this part of a damaged store is lost: %s", error)
        return []


def explain(path: Path | None, error: Exception) -> str:
    """What happened to the file, what was expected, what to do."""
    if isinstance(error, StoreError):
        return str(error)
    code, system = code_of(error), getattr(error, "errno", 0)
    if code == sqlite3.SQLITE_FULL or system in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "Free some space there"
    elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or isinstance(error, TimeoutError):
        remedy = "End the process that keeps it locked"
    elif is_damage(error):
        remedy = "Delete it if it is a store"
    elif code == sqlite3.SQLITE_IOERR:
        remedy = "Check the disk and its free space"
    else:
        remedy = "Check its folder and this user's permissions"
    what = str(error) or type(error).__name__
    return f"store: got {what!r} from {path}, expected a store that can be read and written. {remedy}, {ELSEWHERE}."
