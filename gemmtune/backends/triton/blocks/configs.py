"""Configs of the kernel of block-sparse products, and which of them are legal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from ....device import DeviceInfo
from ....problem import Problem
from ..classes import INT32_LIMIT
from ..configs import SPLITS, STAGES, Config
from ..legality import LEAST_BLOCK, LEAST_BLOCK_K_OF_BYTES, Predicate

Rows = Literal["neighbours", "alike", "pairs"]
MOST_JOINED = 8
"""Blocks of which one panel is joined at most along either side: beyond, nearly all of it is zeros."""
MOST_SPLITS = 16
AXES: Mapping[str, tuple[int, ...]] = {
    "stages": STAGES,
    "warps": (1, 2, 4, 8, 16),
    "group_m": (1, 2, 4, 8, 16, 32),
    "split_k": tuple(split for split in SPLITS if split <= MOST_SPLITS),
}
"""The parameters along which a search goes on from the fastest config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksConfig(Config):
    """``swap``: the weight is the left operand of the instruction, so that its rows fill it where there are few tokens.

    ``rows`` are those of a prepacked weight that lie in one panel of ``block_n`` rows: ``neighbours``, or those that are most
    ``alike``. With ``pairs`` a program has two such panels, of rows that are alike: what is read of a column that both have is
    multiplied with both, and neither with a column that it does not have.
    """

    swap: bool = False
    rows: Rows = "neighbours"

    @property
    def variant(self) -> str:
        """Whether operands are swapped, and which rows are together."""
        return "_swap" * self.swap + (f"_{self.rows}" if self.rows != "neighbours" else "")

    @property
    def panels(self) -> int:
        """Panels of a program."""
        return 2 if self.rows == "pairs" else 1

    @property
    def whole(self) -> Self:
        """The config of a program's tile, of all of its panels."""
        return dataclasses.replace(self, block_n=self.panels * self.block_n, rows="neighbours")

    @property
    def as_multiplied(self) -> Self:
        """``whole`` with the rows of the instruction's left operand as ``block_m``."""
        whole = self.whole
        return dataclasses.replace(whole, block_m=whole.block_n, block_n=whole.block_m) if self.swap else whole


def turned_bytes(problem: Problem, device: DeviceInfo, config: BlocksConfig) -> int:
    """Shared memory through which the tile of swapped operands is turned round on HIP, where no other tile needs any."""
    swapped = device.type == "hip" and config.swap
    return config.block_m * config.block_n * problem.accumulator.itemsize if swapped else 0


def why_not_blocks(problem: Problem) -> str | None:
    """Why the template has nothing for the problem, or None."""
    sparsity = problem.sparsity
    assert sparsity is not None
    if problem.integers and problem.epilogue is not None:
        return "an epilogue of integers is torch's"
    sides = (sparsity.block_n, sparsity.block_k)
    if not problem.prepacked and any(side % LEAST_BLOCK for side in sides):
        return (
            f"blocks of {sides[0]}x{sides[1]}: without gemmtune.prepack, which joins them, sides must be multiples of {LEAST_BLOCK}"
        )
    return None


def why_not_config(problem: Problem, device: DeviceInfo, config: BlocksConfig) -> str | None:
    """Why ``config`` may not be offered, or None. Assumes that ``why_not_blocks`` found nothing."""
    sparsity = problem.sparsity
    assert sparsity is not None
    sides = (sparsity.block_n, sparsity.block_k)
    tile = (config.block_n, config.block_k)
    if not problem.prepacked and any(side % step for side, step in zip(sides, tile, strict=True)):
        return f"tile {tile[0]}x{tile[1]}: does not divide the blocks of {sides[0]}x{sides[1]}"
    if problem.prepacked and any(step > MOST_JOINED * side for side, step in zip(sides, tile, strict=True)):
        return f"tile {tile[0]}x{tile[1]}: joins more than {MOST_JOINED} blocks of {sides[0]}x{sides[1]} along a side"
    if problem.integers and config.block_k < LEAST_BLOCK_K_OF_BYTES:
        return f"block_k {config.block_k}: products of 8 bits need {LEAST_BLOCK_K_OF_BYTES} at least"
    if reason := _why_not_rows(problem, config):
        return reason
    if problem.k * problem.n >= INT32_LIMIT * LEAST_BLOCK * LEAST_BLOCK:
        return "more blocks than indices of 32 bits can count"
    predicate = Predicate(problem, device)
    reason = predicate.check(config.whole)
    if reason is not None or not config.swap or device.type == "cpu":
        return reason
    return device.why_no_smem(turned_bytes(problem, device, config)) or predicate.why_no_room(config.as_multiplied)


def _why_not_rows(problem: Problem, config: BlocksConfig) -> str | None:
    """Why rows of the weight may not be ordered so, or None."""
    if config.rows == "neighbours":
        return None
    sparsity = problem.sparsity
    assert sparsity is not None
    if not problem.prepacked:
        return f"rows {config.rows}: the order of rows is made by gemmtune.prepack"
    if config.rows == "pairs" and config.split_k > 1:
        return f"rows pairs, split_k {config.split_k}: the three parts of a pair's columns are not split"
    joined = config.whole.block_n
    if joined <= sparsity.block_n and sparsity.imbalance == "even":
        return f"rows {config.rows}: {joined} rows are of one block, and all block rows are equally long"
    if problem.n <= joined:
        return f"rows {config.rows}: {problem.n} rows are together in any order"
    return None
