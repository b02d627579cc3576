"""Rotation of cases too slow to run all: each commit takes another part, which is the same for all its runs."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

__all__ = ["HEAVY", "VARIABLE", "WHOLE", "WITHOUT_HEAVY", "choose", "header", "number", "rotated", "takes", "thinned"]

T = TypeVar("T")

VARIABLE = "TEST_ROTATION"
"""Environment variable with the number of the part. ``TEST_ROTATION=7 pytest`` repeats the run that printed 7."""
WHOLE = "all"
"""Value of the variable for a run of all cases, for example each night."""
_DIGITS = 7
HEAVY: Mapping[str, int] = {
    "CUTLASS 3.x": 1,
    "CUTLASS 2.x through the matrix": 4,
    "CUTLASS 2.x fused": 4,
    "a refusal of nvcc": 4,
    "a bug of long sums": 4,
    "AOTInductor": 4,
}
"""Cases of many seconds, with their numbers of turns. A commit takes one of them or none, so that no run has several."""
WITHOUT_HEAVY = sum(HEAVY.values())
"""Number of turns without such a case, which are half of all."""


def choose() -> None:
    """Derive the number and the hash seed from the commit, unless the variables are set. Outside of a repository use 0."""
    if VARIABLE not in os.environ:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        try:
            commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            commit = "0"
        os.environ[VARIABLE] = str(int(commit[:_DIGITS], 16))
    # Processes of a run must give tests the same names, some of which are printed sets.
    os.environ.setdefault("PYTHONHASHSEED", str(number() % 2**32))


def number() -> int:
    """Return the number of the part, which is 0 in a run of all cases."""
    return 0 if os.environ[VARIABLE] == WHOLE else int(os.environ[VARIABLE])


def header() -> str:
    """Return the header line that a run prints."""
    return f"rotation: {os.environ[VARIABLE]} (of the commit; {VARIABLE}={os.environ[VARIABLE]} repeats it)"


def rotated(cases: Sequence[T], every: int, name: str = "") -> Sequence[T]:
    """Return every ``every``-th case. The start takes each value once while the number goes through ``every`` consecutive ones.

    Starts of different names are independent, so that parts of two lists meet in every combination.
    """
    if os.environ[VARIABLE] == WHOLE:
        return cases
    start = (number() + random.Random(f"{number() // every} {name}").randrange(every)) % every
    return cases[start::every] or cases[:1]


def _has_turn(turn: int, every: int) -> bool:
    return os.environ[VARIABLE] == WHOLE or number() % every == turn


def takes(heavy: str) -> bool:
    """Return True if this run takes that one of ``HEAVY``."""
    turns = [name for name, count in HEAVY.items() for _ in range(count)] + [""] * WITHOUT_HEAVY
    return heavy in rotated(turns, len(turns), "heavy")


def thinned(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items without cases whose turn it is not.

    Of each test marked ``rotates(every)`` one part stays, and at least a case. A test marked ``turn(number, every)`` stays whole in
    one of so many commits. A file of which nothing would stay keeps one case.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("rotates"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {item for item in items if (turn := item.get_closest_marker("turn")) and not _has_turn(*turn.args)}
    for name, all_of_test in cases.items():
        marker = all_of_test[0].get_closest_marker("rotates")
        assert marker is not None
        left_out |= set(all_of_test) - set(rotated(all_of_test, *marker.args, name))
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    for path, all_of_file in files.items():
        if left_out.issuperset(all_of_file):
            left_out -= set(rotated(all_of_file, len(all_of_file), path.name))
    return [item for item in items if item not in left_out]
