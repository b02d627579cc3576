"""Configs of the kernel for block-sparse products, and their legality."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, Self

from ....device import DeviceInfo
from ....problem import Problem
from ..classes import INT32_LIMIT
from ..configs import Config
from ..legality import LEAST_BLOCK, LEAST_BLOCK_K_OF_BYTES, Predicate

Rows = Literal["neighbours", "alike", "pairs"]
MOST_JOINED = 8
"""Most blocks per side that one panel merges; beyond it nearly all of the panel is zeros."""
MOST_SPLITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksConfig(Config):
    """Config of a block-sparse product.

    With ``swap`` the weight is the left operand of the instruction and fills its rows at small M. ``rows`` selects the rows of a
    prepacked weight in one panel of ``block_n`` rows: ``neighbours``, or the most ``alike``. With ``pairs`` a program has two such
    panels of similar rows. It reads a column that both have once and multiplies it with both. It multiplies other columns only with
    the panel that has them.
    """

    swap: bool = False
    rows: Rows = "neighbours"

    @property
    def variant(self) -> str:
        return "_swap" * self.swap + (f"_{self.rows}" if self.rows != "neighbours" else "")

    @property
    def panels(self) -> int:
        return 2 if self.rows == "pairs" else 1

    @property
    def whole(self) -> Self:
        """Config of a program's whole tile, with all of its panels."""
        return dataclasses.replace(self, block_n=self.panels * self.block_n, rows="neighbours")

    @property
    def as_multiplied(self) -> Self:
        """Config ``whole`` with ``block_m`` as the rows of the instruction's left operand."""
        whole = self.whole
        return dataclasses.replace(whole, block_m=whole.block_n, block_n=whole.block_m) if self.swap else whole


def transpose_bytes(problem: Problem, device: DeviceInfo, config: BlocksConfig) -> int:
    """Return the shared memory that transposes the tile of swapped operands on HIP; 0 for other tiles, which need none."""
    swapped = device.type == "hip" and config.swap
    return config.block_m * config.block_n * problem.accumulator.itemsize if swapped else 0


def why_not_blocks(problem: Problem) -> str | None:
    sparsity = problem.blocks
    if problem.integers and problem.epilogue is not None:
        return "an epilogue on integer products runs in torch"
    sides = (sparsity.block_n, sparsity.block_k)
    if not problem.prepacked and any(side % LEAST_BLOCK for side in sides):
        return f"blocks of {sides[0]}x{sides[1]}: sides must be multiples of {LEAST_BLOCK}, unless gemmtune.prepack merges blocks"
    return None


def why_not_config(problem: Problem, device: DeviceInfo, config: BlocksConfig) -> str | None:
    """Return why ``config`` may not be offered, or None. ``why_not_blocks`` must have found nothing."""
    sparsity = problem.blocks
    sides = (sparsity.block_n, sparsity.block_k)
    tile = (config.block_n, config.block_k)
    if not problem.prepacked and any(side % step for side, step in zip(sides, tile, strict=True)):
        return f"tile {tile[0]}x{tile[1]}: does not divide the blocks of {sides[0]}x{sides[1]}"
    if problem.prepacked and any(step > MOST_JOINED * side for side, step in zip(sides, tile, strict=True)):
        return f"tile {tile[0]}x{tile[1]}: merges more than {MOST_JOINED} blocks of {sides[0]}x{sides[1]} along a side"
    if problem.integers and config.block_k < LEAST_BLOCK_K_OF_BYTES:
        return f"block_k {config.block_k}: 8-bit products need at least {LEAST_BLOCK_K_OF_BYTES}"
    if reason := _why_not_rows(problem, config):
        return reason
    if problem.k * problem.n >= INT32_LIMIT * LEAST_BLOCK * LEAST_BLOCK:
        return "more blocks than indices of 32 bits can count"
    predicate = Predicate(problem, device)
    reason = predicate.check(config.whole)
    if reason is not None or not config.swap or device.type == "cpu":
        return reason
    return device.why_no_smem(transpose_bytes(problem, device, config)) or predicate.why_no_room(config.as_multiplied)


def _why_not_rows(problem: Problem, config: BlocksConfig) -> str | None:
    if config.rows == "neighbours":
        return None
    sparsity = problem.blocks
    if not problem.prepacked:
        return f"rows {config.rows}: only gemmtune.prepack reorders rows"
    if config.rows == "pairs" and config.split_k > 1:
        return f"rows pairs, split_k {config.split_k}: the three parts of a pair's columns are not split"
    joined = config.whole.block_n
    if joined <= sparsity.block_n and sparsity.imbalance == "even":
        return f"rows {config.rows}: {joined} rows belong to one block, and all block rows have the same length"
    if problem.n <= joined:
        return f"rows {config.rows}: {problem.n} rows share one panel in any order"
    return None
