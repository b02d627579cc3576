"""What the store has from a busy machine, for ``--again`` without shapes."""

from collections.abc import Iterable, Mapping
from typing import Any

import click

from .. import settings
from ..device import DeviceInfo
from ..errors import InvalidProblemError, StoreError
from ..fleet.host import devices_of
from ..problem import Problem
from ..selector.ranges import kind_of
from ..selector.result import DISTURBED
from ..selector.segments import INVARIANT, TABLE, Table
from ..selector.text_table import counted
from ..store.key import fingerprint_text
from ..store.row import Ranged, stored_problem
from .asked import refuse_problem_options
from .output import note
from .stores import opened

Work = tuple[list[Problem], list[tuple[Problem, range]]]
"""Single problems, and problems of tables with their ranges of M."""


def busy_work(devices: Iterable[DeviceInfo], changes: Mapping[str, Any], options: Iterable[str]) -> Work:
    """Return the stored problems and tables that were measured on one of these devices while it was busy.

    ``changes`` are those of the settings, which decide the timing and the kind of the tables. Raises click.UsageError if
    ``options`` of problems are given.
    """
    refuse_problem_options(options)
    with settings.patch(**changes) as chosen:
        machines = {fingerprint_text(info, chosen.timing) for info in devices}
        store = opened(checked=False)
        keys = {row.key for row in store.every_row() if row.fingerprint in machines and row.info.get(DISTURBED)}
        facts = [x for x in store.every_ranged() if x.fingerprint in machines and x.value.get("disturbed")]
        kind = kind_of(chosen)
    tables = [table for fact in facts if fact.kind == kind and (table := _table(fact)) is not None]
    others = sum(fact.kind == INVARIANT for fact in facts) if kind == TABLE else 0
    if others:
        note(f"{counted(others, 'batch-invariant table')} of a busy machine left: add --batch-invariant to measure them again")
    if not keys and not tables:
        note("nothing else of the store was measured on this machine while it was busy" if others else NOTHING)
    return [problem for key in sorted(keys) if (problem := stored_problem(key)) is not None], tables


NOTHING = "nothing of the store was measured on this machine while it was busy"


def _table(fact: Ranged) -> tuple[Problem, range] | None:
    """Return the problem of a table and its range of M, None for a record that another version wrote."""
    problem = stored_problem(fact.key)
    try:
        table = Table.of(fact)
    except (StoreError, InvalidProblemError) as error:
        note(f"warning: {problem or fact.key}: {error}")
        return None
    return None if problem is None else (problem, range(table.lo, table.hi + 1))


def devices_here(devices: str | None, ray: str | None) -> list[DeviceInfo]:
    """Return the devices of this host that ``--devices`` names. Raises click.UsageError for a cluster."""
    if ray is not None:
        raise click.UsageError("--again: got --ray without shapes, expected shapes: each host of a cluster has results of its own")
    return devices_of(devices or "all")
