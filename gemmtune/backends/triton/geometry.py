"""How a problem is divided among the programs of a launch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...problem import Problem
from .configs import Config

__all__ = ["Geometry", "blocks_along_k", "geometry"]

FEW_SPLITS = 8
"""Up to here one program adds up all splits of a tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The grid of a launch and the integers that the kernel takes beside sizes and strides."""

    tiles: int
    splits: int
    k_per_split: int
    splits_per_group: int
    group_m: int
    programs: int | None = None
    """Programs that are launched and go from tile to tile; None: one for each part of the summed dimension of each tile."""

    @property
    def groups(self) -> int:
        """Groups of splits, each added up by one program."""
        return -(-self.splits // self.splits_per_group)

    @property
    def slots(self) -> int:
        """Partial sums that are stored, each of the size of a tile: one for each split, and one for each group."""
        return self.tiles * (self.splits + self.groups) if self.splits > 1 else 0

    @property
    def counters(self) -> int:
        """Counters of arrivals: for each tile one of each group and one of the groups."""
        return self.tiles * (self.groups + 1) if self.splits > 1 else 0

    @property
    def grid(self) -> tuple[int, int, int]:
        """The programs of a launch."""
        return (self.tiles, self.splits, 1) if self.programs is None else (self.programs, 1, 1)


def blocks_along_k(problem: Problem, block_k: int) -> int:
    """Steps of the loops of one program without splits; each product has whole blocks of its own."""
    return sum(-(-k // block_k) for k in problem.summed)


def geometry(problem: Problem, config: Config) -> Geometry:
    """The launch of ``config`` on ``problem``. No split is empty: where K has too few blocks there are fewer splits."""
    tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n) * problem.batch
    blocks = max(blocks_along_k(problem, config.block_k), 1)
    blocks_per_split = -(-blocks // config.split_k)
    splits = -(-blocks // blocks_per_split)
    return Geometry(
        tiles=tiles,
        splits=splits,
        splits_per_group=splits if splits <= FEW_SPLITS else math.isqrt(splits - 1) + 1,
        k_per_split=blocks_per_split * config.block_k,
        group_m=config.group_m,
    )
