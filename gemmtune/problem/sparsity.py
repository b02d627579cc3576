"""What is known of a block-sparse b before its indices are read: the blocks, how many there are, and how evenly."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import InvalidProblemError

Imbalance = Literal["even", "skewed"]
"""Whether the longest block row has at most SKEWED times the mean number of blocks, and one more."""
SKEWED = 2.0
DENSITIES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""The shares of blocks by which problems are told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """The class of a block-sparse weight [N, K], of which b [K, N] is the transpose.

    The weight consists of blocks of ``block_n`` × ``block_k``. ``density`` is the share of blocks that exist, as one of DENSITIES,
    ``imbalance`` how they are spread over the block rows. Which blocks they are is data of the call, like the numbers in them: a
    kernel has to be right for any.
    """

    block_n: int
    block_k: int
    density: float
    imbalance: Imbalance = "even"
    wide_index: bool = False
    """Indices have 64 bits; else 32."""

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
    """Rows and columns of a block that is given by both, or by its side. Raises InvalidProblemError for anything else."""
    sides = block if isinstance(block, tuple | list) else (block, block)
    if len(sides) != 2 or any(not isinstance(side, int) or side < 1 for side in sides):
        raise InvalidProblemError(f"block: got {block!r}, expected its side, or (rows, columns), of 1 or more")
    rows, cols = sides
    return rows, cols


@functools.lru_cache(maxsize=1024)
def density_class(share: float) -> float:
    """The nearest of DENSITIES, on a scale on which 0.01 is as far from 0.02 as 0.5 from 1; 0 for itself alone."""
    if share <= 0:
        return 0.0
    return min(DENSITIES[1:], key=lambda known: abs(math.log(known / share)))


def imbalance_of(longest: int, blocks: int, rows: int) -> Imbalance:
    """The class of a weight of so many ``blocks`` in ``rows`` block rows, the longest of which has ``longest``."""
    return "even" if longest <= SKEWED * blocks / max(rows, 1) + 1 else "skewed"
