"""``gemmtune store``: the place of the store, and the removal of measurements from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import click

from .. import settings
from ..report.names import problem_text
from ..selector.text_table import counted
from ..store.removal import Removable, remove
from ..store.row import Limit, Row, stored_problem
from .output import STDOUT, write_json
from .selection import Selection, machines_here
from .stores import opened

VERSIONS = ("torch", "driver", "cuda", "hip", "cublas", "rocm", "triton", "method")
"""Fields of a fingerprint that an update changes."""


def path(json_file: str | None) -> None:
    """Print the path of the store's file, whether or not it exists."""
    file = settings.given().store_file.absolute()
    if json_file != STDOUT:
        click.echo(file)
    write_json(json_file, {"store": str(file), "exists": file.exists()})


def forget(shapes: Sequence[str], match: str | None, here: bool, every: bool, dry_run: bool, json_file: str | None) -> None:
    """Remove the measurements of problems and the tables that serve them, so that the next tuning measures them again."""
    wanted = Selection.of(shapes, match, here)
    if wanted.empty != every:
        got = "conditions too" if every else "nothing to forget"
        raise click.UsageError(f"store forget: got {got}, expected SHAPE, --match or --here, or else --all alone")

    def chosen(x: Removable) -> bool:
        if isinstance(x, Limit):
            return every
        return wanted.has(*x.scope) if isinstance(x, Row) else wanted.has_table(x.key, x.fingerprint)

    _remove(chosen, dry_run, json_file)


def prune(older: float | None, dry_run: bool, json_file: str | None) -> None:
    """Remove what an update of this machine has made useless, and with ``older`` what is older than so many days."""
    here = [json.loads(text) for text in machines_here()]
    before = None if older is None else (datetime.now(UTC) - timedelta(days=older)).isoformat(timespec="microseconds")

    def chosen(x: Removable) -> bool:
        if before is not None and x.measured_at < before:
            return True
        return _outdated(x.fingerprint, here) or (isinstance(x, Row) and stored_problem(x.key) is None)

    _remove(chosen, dry_run, json_file)


def _outdated(fingerprint: str, here: Sequence[dict[str, str]]) -> bool:
    """Return True for a device of this machine under other versions than those now installed."""
    fields: dict[str, str] = json.loads(fingerprint)
    same = [x for x in here if all(fields.get(name) == x.get(name) for name in ("device", "arch"))]
    return bool(same) and not any(all(fields.get(name) == x.get(name) for name in VERSIONS) for x in same)


def _remove(chosen: Callable[[Removable], bool], dry_run: bool, json_file: str | None) -> None:
    store = opened()
    removed = remove(store, chosen, dry_run=dry_run)
    problems = sorted({problem_text(row.key) for row in removed.rows})
    if json_file != STDOUT:
        for text in problems:
            click.echo(text)
        what = (
            f"{counted(len(removed.rows), 'row')} of {counted(len(problems), 'problem')}, {counted(len(removed.ranged), 'table')}"
        )
        verb = "would be removed from" if dry_run else "removed from"
        click.echo(f"{what} and {counted(len(removed.limits), 'limit')} {verb} {store.path}")
    counts = {"rows": len(removed.rows), "tables": len(removed.ranged), "limits": len(removed.limits)}
    write_json(json_file, counts | {"problems": problems, "removed": not dry_run, "store": str(store.path)})
