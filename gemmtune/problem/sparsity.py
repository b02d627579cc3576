"""The class of a block-sparse b before its indices are read: block size, density, and balance between block rows."""

import functools
import math
from dataclasses import dataclass
from typing import get_args

from ..errors import InvalidProblemError
from ..operand_kinds import Imbalance as Imbalance

SKEWED = 2.0
DENSITIES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Densities that distinguish classes of problems: shares of the blocks that exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """The class of a block-sparse weight [N, K], of which b [K, N] is the transpose.

    The weight consists of blocks of ``block_n`` × ``block_k``. ``density`` is the share of blocks that exist, as one of DENSITIES.
    ``imbalance`` describes their distribution over the block rows. The positions of the blocks are data of the call, like their
    elements: a kernel must be correct for any positions.
    """

    block_n: int
    block_k: int
    density: float
    imbalance: Imbalance = "even"
    wide_index: bool = False
    """True for 64-bit indices, False for 32-bit ones."""

    def __post_init__(self) -> None:
        if self.block_n < 1 or self.block_k < 1:
            raise InvalidProblemError(f"sparsity: got blocks of {self.block_n}x{self.block_k}, expected sides of 1 or more")
        if self.density not in DENSITIES:
            raise InvalidProblemError(
                f"sparsity: got a density of {self.density}, expected one of {', '.join(map(str, DENSITIES))}"
            )
        if self.imbalance not in get_args(Imbalance):
            raise InvalidProblemError(f"sparsity: got {self.imbalance!r}, expected one of {', '.join(get_args(Imbalance))}")

    @property
    def sides(self) -> str:
        """Rows x columns of a block."""
        return f"{self.block_n}x{self.block_k}"

    def __str__(self) -> str:
        index = " int64" if self.wide_index else ""
        return f"blocks {self.sides} density {self.density:g} {self.imbalance}{index}"


def sides_of(block: object) -> tuple[int, int]:
    """Return rows and columns of a block, given as a pair or as one side. Raise InvalidProblemError for anything else."""
    sides = block if isinstance(block, tuple | list) else (block, block)
    if len(sides) != 2 or any(not isinstance(side, int) or side < 1 for side in sides):
        raise InvalidProblemError(f"block: got {block!r}, expected its side, or (rows, columns), of 1 or more")
    rows, cols = sides
    return rows, cols


@functools.lru_cache(maxsize=1024)
def density_class(share: float) -> float:
    """Return the nearest of DENSITIES on a logarithmic scale: 0.01 is as far from 0.02 as 0.5 is from 1. Only 0 maps to 0."""
    if share <= 0:
        return 0.0
    return min(DENSITIES[1:], key=lambda known: abs(math.log(known / share)))


def imbalance_of(longest: int, blocks: int, rows: int) -> Imbalance:
    """Return the class of a weight with ``blocks`` blocks in ``rows`` block rows, the longest of which has ``longest``."""
    return "even" if longest <= SKEWED * blocks / max(rows, 1) + 1 else "skewed"
