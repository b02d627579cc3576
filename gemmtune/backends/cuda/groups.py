"""Tile counts and tile order for groups of rows. Offsets say where groups end, and only the device knows them."""

import math

from ...problem import Problem
from .family import INT32_LIMIT

MOST_TILES = 2**30
"""Maximum number of tiles. They are counted in 32 bits, with room for a last step of all blocks."""
STRIP_ROWS = 2048
"""Rows in one strip of tiles. All multiprocessors together work on about the same number of columns at a time."""


def most_below(problem: Problem, rows: int) -> int:
    """Return the most tile rows of ``rows`` rows in all groups, each with at most one partial tile, for rising offsets."""
    return min(problem.m, problem.m // rows + min(problem.groups, problem.m))


def tiles_below(problem: Problem, rows: int) -> float:
    """Return the expected number of tile rows in all groups for random rows. The model takes a group's rows as normal."""
    share = problem.m / problem.groups
    last = math.ceil(min(problem.m, share + 6 * math.sqrt(share)) / rows)
    further = sum(math.erfc((rows * i + 0.5 - share) / math.sqrt(2 * share)) / 2 for i in range(1, last))
    return problem.groups * (further - math.expm1(-share))


def strip_of_rows(rows: int) -> int:
    """Return the tiles in a strip, with ``rows`` rows per tile."""
    return max(1, STRIP_ROWS // rows)


def why_not_placed(problem: Problem) -> str | None:
    """Return the reason why tile positions may not fit 32 bits, or None."""
    if max(problem.m, problem.n, problem.k) >= INT32_LIMIT // 2:
        return "a tile past the last row or column would not fit 32 bits"
    return None


def why_not_counted(problem: Problem, rows: int, tiles_n: int) -> str | None:
    """Return why tiles of ``rows`` rows, ``tiles_n`` along N, cannot be counted, or None. Falling offsets count too."""
    tiles = problem.groups * -(-problem.m // rows) * tiles_n
    return f"{tiles} tiles, at most {MOST_TILES} can be counted" if tiles >= MOST_TILES else None
