"""``gemmtune show``, ``export``, ``import``, ``merge`` and ``store``: contents, exchange and removal of measurements."""

import contextlib
import dataclasses
import functools
import json
import os
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
from rich.console import RenderableType
from rich.text import Text

from .. import settings
from ..device import DeviceInfo
from ..dispatch.absent import older_kernels
from ..errors import InvalidProblemError, StoreError
from ..problem.rows import RowClass
from ..report.known import Known, known_of
from ..report.names import class_text, machine_text, problem_text
from ..report.other_formats import inductor_table, moe_configs
from ..report.t4 import to_t4
from ..selector.range_result import table_lines
from ..selector.result import Outcome
from ..selector.segments import INVARIANT, TABLE
from ..selector.segments import Table as Segments
from ..selector.stored_tables import KINDS, segments_of
from ..selector.text_table import NAMES, TextTable, counted
from ..store.exchange import to_json
from ..store.row import Limit, Row, stored_problem
from ..store.store import Absorbed, Ranged, Store, open_store
from ..store.storefile import HEAD
from ..timing.rounds import BUSY_MARK
from .files import STDOUT
from .output import announced, reserved_stdout, write_json, write_text
from .printing import answer
from .selection import Removable, Selection, machines_here
from .tunableop import VALIDATOR, results_of

STDIN = "/dev/stdin"
ROUGH = "~"
"""Mark of a time from a short measurement, as in the tables of tune."""
NOTHING = "no problem of the store meets the conditions; gemmtune show lists all"
PROBLEM_CHARS = 120
"""Length at which a table cuts a problem's text: an epilogue may have a thousand characters."""
VERSIONS = ("torch", "driver", "cuda", "hip", "cublas", "rocm", "triton", "method")
"""Fields of a fingerprint that an update changes."""


def show(shapes: Sequence[str], match: str | None, here: bool, rows: int, json_file: str | None) -> None:
    """Show the contents of the store: the pick and the next best choices by machine and problem, and the tables for every M."""
    store, wanted = opened(checked=False), Selection.of(shapes, match, here)
    known = [found for found in known_of(store.every_row()) if wanted.has(found.key, found.fingerprint)]
    tables = [fact for fact in store.every_ranged() if wanted.has_table(fact.key, fact.fingerprint)]
    known.sort(key=lambda k: (k.fingerprint, problem_text(k.key)))
    nothing = "empty; gemmtune tune fills it" if wanted.empty else NOTHING
    parts = (f"store: {store.path}", *(_parts(known, rows) if known or tables else [nothing]), *_tables(tables))
    answer(json_file, [*(k.to_json() for k in known), *(fact.to_json() for fact in tables)], parts)


def export_store(file: str, shapes: Sequence[str], match: str | None, here: bool, file_format: str, json_file: str | None) -> None:
    """Write the store, or the problems that were asked for, as JSON that import reads or in the format of another tool."""
    store, wanted = opened(checked=False), Selection.of(shapes, match, here)
    if file == STDOUT and (json_file == STDOUT or file_format == "moe"):
        raise click.UsageError("FILE: got -, expected a file with --json -, and a folder with --format moe")
    if os.path.isdir(file) and file_format != "moe":
        raise click.ClickException(f"export: cannot write {file}: it is a folder")
    if not wanted.empty and not (any(map(wanted.chooses, store.every_ranged())) or any(map(wanted.chooses, store.every_row()))):
        raise click.ClickException(f"export: {NOTHING}")
    with reserved_stdout() if file == STDOUT else contextlib.nullcontext():
        count, what = _exported(store, wanted, file_format, file)
    if json_file != STDOUT:
        taken = f". This format takes {_TAKEN[file_format]}" if not count and file_format in _TAKEN else ""
        click.echo(f"{counted(count, what[:-1])} of {store.path} written to {file}{taken}", err=file == STDOUT)
    write_json(json_file, {what: count, "store": str(store.path), "file": file})


def _exported(store: Store, wanted: Selection, file_format: str, file: str) -> tuple[int, str]:
    """Write what was asked for in a format, and return the number of things written, and their name."""
    if file_format == "gemmtune" and file != STDOUT:
        return store.export_file(file, wanted.chooses), "rows"
    rows = [row for row in store.every_row() if wanted.chooses(row)]
    if file_format == "gemmtune":
        limits, tables = filter(wanted.chooses, store.every_limit()), filter(wanted.chooses, store.every_ranged())
        write_json(file, to_json(rows, [*limits], [*tables]), "export")
        return len(rows), "rows"
    if file_format == "t4":
        write_json(file, to_t4(rows), "export")
        return len(rows), "rows"
    if file_format == "inductor":
        write_json(file, table := inductor_table(rows), "export")
        return len(table), "products"
    if file_format == "tunableop":
        results = results_of(rows)
        write_text(file, "".join(f"{line}\n" for line in results), "export")
        return sum(not line.startswith(VALIDATOR) for line in results), "products"
    files = moe_configs(rows)
    try:
        Path(file).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"export: cannot make the folder {file}: {error.strerror}") from error
    for name, content in files.items():
        write_json(str(Path(file) / name), content, "export")
    return len(files), "layers"


_TAKEN = {
    "inductor": "measured mm and bmm of one float dtype on a GPU, without an epilogue",
    "tunableop": "measured mm and bmm on a GPU, without an epilogue",
    "moe": "measured grouped GEMMs of routed experts on a GPU",
}
"""GEMMs that a format takes."""


def import_store(file: str, json_file: str | None) -> None:
    """Merge a FILE that export wrote, or a store, into the store. If both have a choice, the later measurement stays."""
    store = opened()
    file = STDIN if file == STDOUT else file
    _report(store, store.merge(file) if _is_database(file) else store.import_file(file), file, json_file)


def _is_database(file: str) -> bool:
    if os.path.exists(file) and not (os.path.isfile(file) or os.path.isdir(file)):
        return False  # what a pipe yields can be read once only
    try:
        with open(file, "rb") as opened_file:
            return opened_file.read(len(HEAD)) == HEAD
    except OSError as error:
        raise click.ClickException(f"cannot read {file}: {error.strerror}") from error


def opened(*, checked: bool = True) -> Store:
    """Return the store of the settings. Raises StoreError if its file cannot be used, because these commands need the file.

    The whole file is ``checked``, which takes as long as reading it. What reads all rows checks them itself.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = open_store(dataclasses.replace(settings.given(), disable=False))
        state = store.health().state if checked else store.state
    if state == "memory":
        # The error repeats the warning.
        raise StoreError(store.trouble or f"store: {store.path} cannot be used")
    for warning in caught:
        warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    return store


def _report(store: Store, absorbed: Absorbed, source: str, json_file: str | None) -> None:
    if json_file != STDOUT:
        click.echo(
            f"{absorbed.total} rows of {source}: {absorbed.added} new, {absorbed.replaced} newer than ours, "
            f"{absorbed.kept} not newer than ours and ignored; store: {store.path}"
        )
    data = {"added": absorbed.added, "replaced": absorbed.replaced, "kept": absorbed.kept}
    write_json(json_file, data | {"store": str(store.path), "source": source})


def _parts(known: list[Known], rows: int) -> Iterator[RenderableType]:
    for fingerprint in dict.fromkeys(k.fingerprint for k in known):
        yield Text(f"\n{machine_text(fingerprint)}", style="bold")
        yield _table([k for k in known if k.fingerprint == fingerprint], rows)


def _tables(facts: Iterable[Ranged]) -> Iterator[RenderableType]:
    """Yield a bar of the segments of each table, under its class of problems."""
    facts = [fact for fact in facts if fact.kind in (TABLE, INVARIANT)]
    for fact in sorted(facts, key=lambda fact: (fact.fingerprint, class_text(fact.key), fact.kind)):
        yield Text(f"\n{class_text(fact.key)}" + ", batch-invariant" * (fact.kind == INVARIANT), style="bold")
        try:
            yield Text("\n".join(table_lines(Segments.of(fact))))
        except (StoreError, InvalidProblemError) as error:
            yield Text(f"  {error}")


def _table(known: list[Known], rows: int) -> TextTable:
    table = TextTable(
        texts=("problem", NAMES),
        numbers=("time µs", "× torch", "right", "failed", "measured (UTC)"),
        last="note",
        optional=("right", "failed", "measured (UTC)"),
    )
    for k in known:
        outcomes, speedup = k.outcomes, k.speedup_over_torch
        latest = max(row.measured_at for row in k.rows)
        first = outcomes[0] if outcomes else None
        cells = (
            textwrap.shorten(problem_text(k.key), PROBLEM_CHARS, placeholder=" …"),
            first.name if first else "none",
            _time(first) if first else "–",
            f"{speedup:.2f}" if speedup else "–",
            str(len(outcomes)),
            str(len(k.rows) - len(outcomes)),
            latest[:16].replace("T", " "),
            BUSY_MARK if k.disturbed else "",
        )
        table.add_row(*map(Text, cells))
        for outcome in outcomes[1:rows]:
            mark = BUSY_MARK if outcome.disturbed else ""
            table.add_row("", Text(outcome.name), _time(outcome), "", "", "", "", mark)
    return table


def _time(outcome: Outcome) -> str:
    """Return a time, with the mark of a short measurement."""
    return f"{'' if outcome.finalist else ROUGH}{outcome.time_us:.1f}"


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

    _remove(_Contents(opened(checked=False)), lambda x: every if isinstance(x, Limit) else wanted.chooses(x), dry_run, json_file)


def prune(older: float | None, dry_run: bool, json_file: str | None) -> None:
    """Remove what an update of this machine has made useless, and with ``older`` what is older than so many days."""
    machines = machines_here()
    here = [json.loads(text) for text in machines]
    before = "" if older is None else (datetime.now(UTC) - timedelta(days=older)).isoformat(timespec="microseconds")
    outdated = functools.cache(lambda fingerprint: _outdated(fingerprint, here))
    contents = _Contents(opened(checked=False))
    with announced("looking for older kernels"):
        useless = _useless(contents, machines)
    _remove(contents, lambda x: x.measured_at < before or outdated(x.fingerprint) or x.identity in useless, dry_run, json_file)


class _Contents:
    """All records of a store, read once and without a lock, so that others can write to it then."""

    def __init__(self, store: Store) -> None:
        self.store, self.rows, self.limits, self.ranged = store, store.every_row(), store.every_limit(), store.every_ranged()


def _useless(store: _Contents, machines: Mapping[str, DeviceInfo]) -> set[tuple[str, ...]]:
    """Return the identities of what this version of gemmtune cannot read, and of these machines' kernels that it does not have."""
    found, scopes, chosen = set[tuple[str, ...]](), dict[tuple[str, str], list[Row]](), settings.current()
    for row in store.rows:
        scopes.setdefault(row.scope, []).append(row)
    for (key, fingerprint), rows in scopes.items():
        problem, device = stored_problem(key), machines.get(fingerprint)
        hashes = older_kernels(rows, problem, device, chosen) if problem is not None and device is not None else set()
        found |= {x.identity for x in rows if problem is None or x.content_hash in hashes}
    for fact in (x for x in store.ranged if x.kind in KINDS):
        segments, problem, device = segments_of(fact), stored_problem(fact.key), machines.get(fact.fingerprint)
        older = not segments or problem is None
        if problem is not None and device is not None:
            rows_class = RowClass(problem=problem)
            older |= any(older_kernels([x], rows_class.at(x.sampled_m), device, chosen) for x in segments)
        found |= {fact.identity} if older else set()
    return found


def _outdated(fingerprint: str, here: Sequence[dict[str, str]]) -> bool:
    """Return True for a device of this machine under other versions than those now installed."""
    fields: dict[str, str] = json.loads(fingerprint)
    same = [x for x in here if all(fields.get(name) == x.get(name) for name in ("device", "arch"))]
    return bool(same) and not any(all(fields.get(name) == x.get(name) for name in VERSIONS) for x in same)


def _remove(contents: _Contents, chosen: Callable[[Removable], bool], dry_run: bool, json_file: str | None) -> None:
    store = contents.store
    rows, limits, ranged = ([*filter(chosen, found)] for found in (contents.rows, contents.limits, contents.ranged))
    if not dry_run:
        store.change(lambda database: database.remove(rows, limits, ranged))
    problems = sorted({problem_text(row.key) for row in rows})
    if json_file != STDOUT:
        for text in problems:
            click.echo(text)
        what = f"{counted(len(rows), 'row')} of {counted(len(problems), 'problem')}, {counted(len(ranged), 'table')}"
        verb = "would be removed from" if dry_run else "removed from"
        click.echo(f"{what} and {counted(len(limits), 'limit')} {verb} {store.path}")
    counts = {"rows": len(rows), "tables": len(ranged), "limits": len(limits)}
    write_json(json_file, counts | {"problems": problems, "removed": not dry_run, "store": str(store.path)})
