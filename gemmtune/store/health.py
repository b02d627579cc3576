"""Check of a whole store file, and removal of a corrupt one."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ..cache.locking import file_lock
from .database import Database
from .storefile import FAILURES, corrupt, is_corruption, move_aside


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """State of a store: ``file``, ``read-only`` (new measurements stay in memory) or ``memory`` (all measurements do)."""

    path: Path | None
    state: str
    detail: str
    scopes: int
    """Problems, counted once for each machine."""
    rows: int
    size_bytes: int
    journal_mode: str


def check(database: Database) -> int:
    """Read and check a whole file, and return its number of rows.

    Raises sqlite3.DatabaseError for damage, or a record that does not match its checksum.
    """
    if (finding := database.pragma("integrity_check(1)")) != "ok":
        raise corrupt(finding)
    for _ in (*database.limits(), *database.ranged()):
        pass
    return sum(1 for _ in database.every_row())


def contents(database: Database) -> tuple[int, int, str]:
    """Check a whole file, and return its numbers of problems and rows and its journal mode."""
    rows = check(database)
    return database.scopes(), rows, database.pragma("journal_mode")


def set_aside(database: Database) -> Path | None:
    """Rename a corrupt file and return its new path; None if it is gone or whole. Raises one of FAILURES if it has to stay."""
    assert database.path is not None
    database.close()
    with file_lock(Path(f"{database.path}.lock"), database.busy_timeout_s):
        if not database.path.exists():
            return None
        with contextlib.closing(Database(database.path, read_only=True, busy_timeout_s=database.busy_timeout_s)) as now:
            try:
                check(now)
                return None
            except FAILURES as error:
                if not is_corruption(error):
                    raise
        return move_aside(database.path)
