"""Measure every legal choice of each problem, so that a replay can judge searches by all that could have been found.

    python benchmarks/exhaustive.py -o exhaustive.json.gz --seconds 540
    gemmtune replay exhaustive.json.gz

A problem is complete or left out: the file has those whose legal choices all have an outcome, and every launch variant that a quick
or a default search asks for. What is measured stays in the store, and the next run goes on from there. Kernels of a GPU compile in
the background while earlier problems are measured.

Short measurements one after the other see changing clocks: at a GPU's power limit they differ by 12% from final rounds.
So the fastest choices and those of the searches take turns at the end, and all other times are scaled by what that changed.
``--again`` repeats this for the complete problems of the file.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from gemmtune import settings
from gemmtune.choice import Choice
from gemmtune.cli.shapes import problems_and_ranges
from gemmtune.cli.spec import Spec
from gemmtune.device import detect
from gemmtune.dispatch.host import host_us
from gemmtune.replacing import replacing
from gemmtune.report.known import Known
from gemmtune.report.replay import Order, asked
from gemmtune.report.sources import read
from gemmtune.selector.candidates import Candidates, candidates_for, outcome_of, row_of
from gemmtune.selector.finals import Measuring
from gemmtune.selector.machine_limits import MachineLimits
from gemmtune.selector.measure import examine_all, outcome
from gemmtune.selector.pick import right
from gemmtune.selector.precompile import Compilation, precompile
from gemmtune.selector.progress import Progress
from gemmtune.selector.remote import open_session
from gemmtune.selector.select import select
from gemmtune.settings import Search
from gemmtune.store.exchange import to_json
from gemmtune.store.row import Row
from gemmtune.store.store import Store

SHAPES = Path(__file__).parent / "shapes/replay.json"
SEARCHES: tuple[Search, ...] = ("quick", "default")
ORDERS: tuple[Order, ...] = ("tuning", "ranked")
FASTEST = 96
"""Number of the fastest choices of a problem that take turns at the end."""
DIGITS = 6
"""Significant digits of a time in the file. Measurements repeat within 0.1% at best."""


def complete(each: Candidates, store: Store, compilation: Compilation | None) -> bool:
    """Measure what the store lacks of a problem. Return True if nothing is missing before the deadline.

    A replay may ask for choices of a library that is not installed here. These are never measured.
    """
    limits = MachineLimits(each.device, each.settings, store)
    while True:
        _, result = select(each, Progress(), compilation, limits=limits)
        if result.partial or each.late:
            return False
        found = known(each, store)
        names = searched(each, found) - {row.name for row in found.rows}
        choices = [choice for choice in variants(each.offers.choices) if choice.name in names]
        if not choices:
            return True
        measure_also(each, choices, store)


def known(each: Candidates, store: Store) -> Known:
    """Return the stored outcomes of a problem."""
    return Known(
        key=each.problem.key, fingerprint=each.fingerprint, rows=tuple(store.rows(each.problem.key, each.fingerprint).values())
    )


def searched(each: Candidates, found: Known) -> set[str]:
    """Return the names of the choices and variants that a quick or a default search measures."""
    return {name for search in SEARCHES for order in ORDERS for name in asked(found, search, each.settings, order)}


def entrants(each: Candidates, found: Known) -> list[Choice]:
    """Return the fastest choices and all correct ones that a quick or a default search measures, torch's among them."""
    correct = {o.name: o for o in right(map(outcome_of, found.rows))}
    names = {*list(correct)[:FASTEST], *(searched(each, found) & correct.keys())}
    return [choice for choice in variants(each.offers.choices) if choice.name in names]


def compared(each: Candidates, found: Known, choices: Sequence[Choice], compilation: Compilation | None) -> Known:
    """Give the choices comparable times. The others keep theirs in proportion, by the median of what changed."""
    failures = (compilation.wait(choices) if compilation else {}) or precompile(choices, each.settings)
    playing = [c for c in choices if c.name not in failures and (c.compile_key is None or c.compiled)]
    with open_session(each.problem, each.device, each.settings, each.host_us) as session:
        times = session.rank(playing).times
    before = {row.name: row for row in found.rows}
    ratios = [times[name].time_us / before[name].time_us for name in times if before[name].time_us and not before[name].finalist]
    scale = statistics.median(ratios) if ratios else 1.0
    click.echo(f"{each.problem}: {len(times)} of {len(choices)} choices compared, {scale:.3f} of their short measurements")
    rows = [
        dataclasses.replace(row, time_us=times[row.name].time_us, finalist=True)
        if row.name in times
        else dataclasses.replace(row, time_us=row.time_us and row.time_us * scale)
        for row in found.rows
    ]
    return dataclasses.replace(found, rows=tuple(rows))


def variants(choices: Iterable[Choice]) -> Iterator[Choice]:
    """Yield the choices and their launch variants, those of variants too, each once."""
    pending, seen = list(choices), set[str]()
    while pending:
        choice = pending.pop()
        if choice.content_hash not in seen:
            seen.add(choice.content_hash)
            yield choice
            pending += choice.launch_variants()


def measure_also(each: Candidates, choices: Sequence[Choice], store: Store) -> None:
    """Compile, verify and briefly measure further choices, and store their outcomes."""
    stored = each.stored(store)
    merged = dataclasses.replace(stored, choices={**stored.choices, **{c.content_hash: c for c in choices}})
    failures = precompile(choices, each.settings, until=each.deadline)
    outcomes = {c.content_hash: outcome(c, merged, failures[c.name]) for c in choices if c.name in failures}
    with open_session(each.problem, each.device, each.settings, each.host_us) as session:
        x = Measuring(session, merged, outcomes, Progress())
        examine_all(x, [c for c in choices if c.name not in failures and (c.compile_key is None or c.compiled)])
    store.put([row_of(o, each.problem, each.fingerprint) for o in outcomes.values()])


def rounded(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows of a problem with few digits and one date, which compress to half the size."""
    date = max(row.measured_at for row in rows)
    for row in rows:
        time_us, error = (None if x is None else float(f"{x:.{DIGITS}g}") for x in (row.time_us, row.error_over_bound))
        yield dataclasses.replace(row, time_us=time_us, error_over_bound=error, measured_at=date)


def write(path: Path, found: Iterable[Known]) -> None:
    """Write the problems as a compressed export."""
    data = to_json([row for each in found for row in rounded(each.rows)], [], [])
    with replacing(path) as new, gzip.GzipFile(new, mode="wb", mtime=0) as file:
        file.write(json.dumps(data, separators=(",", ":")).encode())


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--shapes", default=str(SHAPES), show_default=True, help="A file of shapes, tried in this order.")
@click.option(
    "--part", nargs=2, type=click.IntRange(0), default=(0, 1), help="PART and COUNT: every COUNT-th shape, from PART = 0 on."
)
@click.option("--device", default=None, help="cpu, cuda or cuda:N; by default cuda if there is a GPU.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=math.inf, help="Time for all; no limit by default.")
@click.option("--backends", default=None, help="Comma-separated names of backends; by default all that serve the device.")
@click.option("--store", "store_file", default="exhaustive.sqlite", show_default=True, help="Measurements, kept from run to run.")
@click.option(
    "-o", "--output", default="exhaustive.json.gz", show_default=True, help="The file of complete problems; earlier ones stay."
)
@click.option("--again", is_flag=True, help="Only compare the fastest choices of the file's problems again.")
@click.option("--add", multiple=True, type=click.Path(exists=True), help="A file of another run, whose problems are taken over.")
def main(
    shapes: str,
    part: tuple[int, int],
    device: str | None,
    seconds: float,
    backends: str | None,
    store_file: str,
    output: str,
    again: bool,
    add: tuple[str, ...],
) -> None:
    """Measure the problems until the time is up, and write the complete ones after each."""
    begun, info, file = time.monotonic(), detect(device), Path(output)
    problems, _ = problems_and_ranges(Spec(device_type=info.type), (), shapes, None, None)
    earlier = [*map(Path, add), *([file] if file.exists() else [])]
    done = {each.key: each for source in map(read, earlier) for each in source.known}
    wanted = [p for p in problems[part[0] :: part[1]] if (p.key in done) is again]
    if add:
        write(file, done.values())
    named = {"backends": tuple(backends.split(","))} if backends else {}
    with settings.patch(search="exhaustive", tune="on_miss", store_path=store_file, **named) as chosen:
        store, host, on_gpu = Store.open(Path(store_file)), host_us(info, chosen), info.type != "cpu"
        listed = [candidates_for(p, info, chosen, host_us=host) for p in wanted]
        work = [each.within(begun + seconds - time.monotonic()) for each in listed]
        playing = {each.problem.key: entrants(each, done[each.problem.key]) for each in work if again}
        missing = [c for each in work for c in (playing.get(each.problem.key) or each.stored(store).missing)] if on_gpu else ()
        with Compilation(missing, chosen) as compilation:
            for each in work:
                started, key = time.monotonic(), each.problem.key
                whole = again or complete(each, store, compilation if on_gpu else None)
                found = done[key] if again else known(each, store)
                counts = f"{len(each.offers.choices)} choices offered, {len(found.rows)} stored"
                if whole:
                    chosen_now = playing.get(key) or entrants(each, found)
                    done[key] = compared(each, found, chosen_now, compilation if on_gpu else None)
                    write(file, done.values())
                took = time.monotonic() - started
                click.echo(f"{'complete' if whole else 'LEFT OUT'}: {each.problem}: {counts}, {took:.0f} s")
                if each.late:
                    break
    click.echo(f"{output} has {len(done)} complete problems")


if __name__ == "__main__":
    main()
