"""Proof of a choice over an interval of Ms: legality for every M, correct results at Ms where its behaviour changes."""

import bisect
import functools
import itertools
import math
import random
from collections.abc import Callable, Container, Iterator, Sequence

from ..choice import Choice, Status
from ..device import DeviceInfo
from ..problem.layout import ALIGNED_BYTES
from ..problem.rows import RowClass, with_columns
from ..settings import Settings
from .accidents import done_by_machine
from .precompile import precompile
from .remote import open_session
from .segments import Segment

RANDOM_ROWS = 3
"""Random Ms checked in each interval."""
MOST_EDGES = 3
"""Tile edges checked in each interval, counted from its start."""
ALIGNMENTS = (0, 1, 2, 4, 8)
"""Offsets from a multiple of 16. Each gives M another largest power of two."""
PROVED_ROWS, PROVED_COLUMNS = 96, 300
"""Largest product by which a default choice is verified on a CPU: several tiles in each direction, some of them partial."""
EVERY_ROW = 48
"""Values of M checked for their kernel at each end of an interval."""


def legal_runs(choice: Choice, rows: range, rows_class: RowClass, device: DeviceInfo) -> Iterator[tuple[range, str | None]]:
    """Yield intervals of the Ms in the class in which the choice is legal (None), or illegal with the first reason."""

    @functools.cache
    def why_not(m: int) -> str | None:
        found = choice.at(rows_class.at(m), device)
        return found if isinstance(found, str) else None

    legal = _legal_rows(why_not, rows, rows_class) if choice.legal_between else None
    begin, fine_before = rows[0], None
    reason: str | None = None
    for m in rows_class.within(rows):
        fine = why_not(m) is None if legal is None else m in legal[math.gcd(m, ALIGNED_BYTES)]
        if fine == fine_before:
            continue
        if fine_before is not None:
            yield range(begin, m), reason
            begin = m
        fine_before, reason = fine, None if fine else why_not(m)
    yield range(begin, rows[-1] + 1), reason


def _legal_rows(why_not: Callable[[int], str | None], rows: range, rows_class: RowClass) -> dict[int, Container[int]]:
    """Return the legal Ms of a ``legal_between`` choice by the largest power of two up to 16 that divides them: intervals."""
    found: dict[int, Container[int]] = {}
    for power in (1, 2, 4, 8, ALIGNED_BYTES):
        step = min(2 * power, ALIGNED_BYTES)
        first = next((m for m in rows[: 2 * ALIGNED_BYTES] if math.gcd(m, ALIGNED_BYTES) == power and rows_class.has(m)), None)
        members = range(first, rows.stop, step) if first is not None else range(0)
        ends = [why_not(m) is None for m in (members[0], members[-1])] if members else []
        if all(ends):
            found[power] = members
        elif not any(ends):
            found[power] = frozenset(m for m in members if why_not(m) is None)
        elif ends[0]:
            found[power] = members[: bisect.bisect_left(members, True, key=lambda m: why_not(m) is not None)]
        else:
            found[power] = members[bisect.bisect_left(members, True, key=lambda m: why_not(m) is None) :]
    return found


def kernels_of(choice: Choice, rows: range, rows_class: RowClass, device: DeviceInfo) -> list[Choice]:
    """Return the choice at the first M of each run of Ms with one kernel. Kernels recur only where M is part of a stride."""

    @functools.cache
    def at(m: int) -> Choice | None:
        found = choice.at(rows_class.at(m), device) if rows_class.has(m) else None
        return found if isinstance(found, Choice) else None

    if choice.one_kernel:
        first = next((one for m in rows if (one := at(m)) is not None), None)
        return [] if first is None else [first]
    checked = {*rows[:EVERY_ROW], *rows[-EVERY_ROW:]}
    power = 16
    while power <= rows[-1]:
        checked |= {m for m in (power - 1, power, power + 1, power + 2, power + 4, power + 8) if m in rows}
        power *= 2
    known = [(m, here) for m in sorted(checked) if (here := at(m)) is not None]
    found = [here for _, here in known[:1]]
    for (before, _), (m, there) in itertools.pairwise(known):
        if there.compile_key == found[-1].compile_key:
            continue
        low, high, here = before, m, there
        while high - low > 1:
            middle = (low + high) // 2
            between = at(middle)
            if between is None or between.compile_key == found[-1].compile_key:
                low = middle
            else:
                high, here = middle, between
        found.append(here)
    return found


def rows_to_check(segment: Segment, rows_class: RowClass, tile: int | None, generator: random.Random) -> tuple[int, ...]:
    """Return the Ms at which a choice is verified: ends, edges of tiles, one for each alignment and kernel, and random ones."""
    rows = rows_class.within(range(segment.lo, segment.hi + 1))
    if not rows:
        return ()
    wanted = {rows[0], rows[-1], *segment.kernels}
    if tile:
        first = -(-rows[0] // tile) * tile
        for edge in range(first, min(first + MOST_EDGES * tile, rows[-1]), tile):
            wanted |= {edge - 1, edge, edge + 1}
    middle = (rows[0] + rows[-1]) // 2 // ALIGNED_BYTES * ALIGNED_BYTES
    wanted |= {middle + step for step in ALIGNMENTS}
    wanted |= {generator.choice(rows) for _ in range(RANDOM_ROWS)}
    return tuple(sorted(m for m in wanted if m in rows))


def failures_of(
    jobs: Sequence[tuple[Choice, Sequence[int]]], rows_class: RowClass, device: DeviceInfo, settings: Settings
) -> dict[str, str]:
    """Return the failures by the name of the choice: the M at which it fails, and why. The machine gets a second try."""
    parts = [(c.name, at) for c, rows in jobs for m in rows if isinstance(at := c.at(rows_class.at(m), device), Choice)]
    compiled = precompile([at for _, at in parts], settings)
    failed = {name: f"M = {at.problem.m}: {compiled[at.name].reason}" for name, at in parts if at.name in compiled}
    with open_session(rows_class.at(max(m for _, rows in jobs for m in rows)), device, settings) as session:
        for name, at in parts:
            if name not in failed:
                sample = session.prove_rows(at)
                if done_by_machine(sample):
                    sample = session.prove_rows(at)
                if sample.status is not Status.OK:
                    failed[name] = f"M = {at.problem.m}: {sample.status}: {sample.reason}"
    return failed


def narrow(rows_class: RowClass, columns: int = PROVED_COLUMNS) -> RowClass:
    """Return the class with the first columns of its weight."""
    return rows_class if columns >= rows_class.problem.n else RowClass(problem=with_columns(rows_class.problem, columns))


def tile_rows(choice: Choice) -> int | None:
    """Return the rows of the choice's tile from its backend's log entry. None if there is none."""
    value = choice.info.get("tile") or choice.info.get("mr")
    first = value[0] if isinstance(value, (list, tuple)) else value
    return first if isinstance(first, int) and first > 1 else None
