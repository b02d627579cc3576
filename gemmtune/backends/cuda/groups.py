"""Tiles of groups of rows: how many there may be, and in which order they come.

Where they are is said by offsets, which only the device knows.
"""

from __future__ import annotations

import math

from ...problem import Problem
from .family import INT32_LIMIT

MOST_TILES = 2**30
"""Tiles are counted in 32 bits, with room for a last step of all blocks."""
STRIP_ROWS = 2048
"""Rows of a strip: as many columns are worked on at a time by all multiprocessors."""


def most_below(problem: Problem, rows: int) -> int:
    """Tiles of so many rows below each other in all groups at most, where offsets rise: each group may have one that is not full,
    and none without rows."""
    return min(problem.m, problem.m // rows + min(problem.groups, problem.m))


def tiles_below(problem: Problem, rows: int) -> float:
    """Tiles of so many rows that all groups are expected to have, if each row goes to any group: how many go to one is taken to be
    normally distributed."""
    share = problem.m / problem.groups
    last = math.ceil(min(problem.m, share + 6 * math.sqrt(share)) / rows)
    further = sum(math.erfc((rows * i + 0.5 - share) / math.sqrt(2 * share)) / 2 for i in range(1, last))
    return problem.groups * (further - math.expm1(-share))


def strip_of_rows(rows: int) -> int:
    """The tiles of so many rows in a strip."""
    return max(1, STRIP_ROWS // rows)


def why_not_placed(problem: Problem) -> str | None:
    """Why places of tiles may not fit, or None."""
    if max(problem.m, problem.n, problem.k) >= INT32_LIMIT // 2:
        return "a tile behind the last row or column would not fit 32 bits"
    return None


def why_not_counted(problem: Problem, rows: int, beside: int) -> str | None:
    """Why tiles of so many rows, so many of them beside each other, cannot be counted, or None; also of offsets that fall, of which
    each group may have all rows."""
    tiles = problem.groups * -(-problem.m // rows) * beside
    return f"{tiles} tiles, at most {MOST_TILES} can be counted" if tiles >= MOST_TILES else None
