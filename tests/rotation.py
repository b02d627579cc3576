"""Which part of the cases a run takes where all would take too long: another part for each commit, the same for all its runs."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

__all__ = ["HEAVY", "VARIABLE", "choose", "header", "rotated", "takes"]

T = TypeVar("T")

VARIABLE = "TEST_ROTATION"
"""The environment variable that has the number of the part; ``TEST_ROTATION=7 pytest`` repeats the run that printed 7."""
_DIGITS = 7
HEAVY: Mapping[str, int] = {
    "CUTLASS 3.x": 1,
    "CUTLASS 2.x through the matrix": 4,
    "CUTLASS 2.x fused": 4,
    "a refusal of nvcc": 4,
    "a bug of long sums": 4,
}
"""Cases of many seconds each, and the turns that each has: a commit takes one of them, so that none takes several."""


def choose() -> None:
    """Derive the number, and the seed of hashes, from the commit, unless the variables are set; 0 outside of a repository."""
    if VARIABLE not in os.environ:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        try:
            commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            commit = "0"
        os.environ[VARIABLE] = str(int(commit[:_DIGITS], 16))
    # Processes that share a run have to give the tests the same names, and some of these are printed sets.
    os.environ.setdefault("PYTHONHASHSEED", str(int(os.environ[VARIABLE]) % 2**32))


def header() -> str:
    """What a run prints of it."""
    return f"rotation: {os.environ[VARIABLE]} (of the commit; {VARIABLE}={os.environ[VARIABLE]} repeats it)"


def rotated(cases: Sequence[T], every: int, name: str = "") -> Sequence[T]:
    """Each ``every``-th case, from a start that takes each value while the number goes through ``every`` following ones.

    Names have starts of their own, which tell nothing of each other: parts of two lists meet in every way.
    """
    number = int(os.environ[VARIABLE])
    start = (number + random.Random(f"{number // every} {name}").randrange(every)) % every
    return cases[start::every] or cases[:1]


def takes(heavy: str) -> bool:
    """Whether it is the turn of that one of ``HEAVY``."""
    turns = [name for name, count in HEAVY.items() for _ in range(count)]
    return rotated(turns, len(turns), "heavy")[0] == heavy
