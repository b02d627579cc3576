"""Removal of records from a store."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from .database import Database
from .ranged import Ranged
from .row import Limit, Row
from .store import Store

Removable = Row | Limit | Ranged


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Records that were removed."""

    rows: tuple[Row, ...]
    limits: tuple[Limit, ...]
    ranged: tuple[Ranged, ...]


def remove(store: Store, chosen: Callable[[Removable], bool], *, dry_run: bool = False) -> Removed:
    """Remove the chosen records in one transaction, unless ``dry_run``, and return them. Raises StoreError if that fails."""
    return store.change(functools.partial(_removed, chosen=chosen, dry_run=dry_run))


def _removed(database: Database, chosen: Callable[[Removable], bool], *, dry_run: bool) -> Removed:
    with database.transaction():
        found = Removed(
            rows=tuple(row for row in database.every_row() if chosen(row)),
            limits=tuple(limit for limit in database.limits() if chosen(limit)),
            ranged=tuple(fact for fact in database.ranged() if chosen(fact)),
        )
        if not dry_run:
            database.delete(found.rows, found.limits, found.ranged)
    return found
