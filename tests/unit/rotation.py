"""Samples that differ from commit to commit, so that in time every case has its turn."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

__all__ = ["SEED", "rotated"]

T = TypeVar("T")


def _seed() -> str:
    """The commit, or nothing outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


SEED = _seed()


def rotated(cases: Sequence[T], count: int) -> list[T]:
    """So many of the cases, by the commit."""
    print(f"a sample of {count} of {len(cases)} by the seed {SEED!r}")
    return random.Random(SEED).sample(list(cases), min(count, len(cases)))
