"""Candidate kernels of the blocks template, ordered by a model of their limits."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from ....choice import Offers, Refusal
from ....device import DeviceInfo
from ....effort import EFFORT
from ....problem import Problem
from ..arch import can_overlap
from ..configs import repeats, splits_for, tiles_of
from ..legality import LEAST_BLOCK
from .choice import BlocksChoice
from .configs import MOST_SPLITS, BlocksConfig, why_not_blocks, why_not_config

BLOCKS_M, PANELS_N, PANELS_K = (16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (16, 32, 64, 128)
STAGES = (4, 3)
SMALL_M = 32
"""Largest M for which the weight is always the left operand of the instruction."""
WARP_GROUP_ROWS = 64
"""Weight rows that fill a warp group's instruction, so that the weight may be the left operand for larger M too."""
MOST_ALIKE = 3
"""Most configs of one output tile that are tried first."""
MOST_ORDERED = 2
"""Most configs per output tile and row order, for configs that reorder the weight's rows."""
ORDERED_EVERY = 4
"""Interval of configs that reorder rows in the order of trials, if reordering changes anything."""
EXCESS = 0.75
"""Share of a panel's excess columns, those not in all its rows, that remains if similar rows are grouped.

The value holds for random blocks; most patterns have less.
"""
INTERPRETED = (
    BlocksConfig(block_m=16, block_n=16, block_k=16, stages=1, warps=1),
    BlocksConfig(block_m=32, block_n=32, block_k=32, stages=1, warps=1, swap=True),
    BlocksConfig(block_m=16, block_n=16, block_k=32, stages=1, warps=1, split_k=2),
    BlocksConfig(block_m=16, block_n=16, block_k=16, stages=1, warps=1, rows="pairs"),
)
"""Configs for the interpreter, which only checks values."""


def block_offers(problem: Problem, device: DeviceInfo, search: str) -> Offers:
    """Return the kernels that a search tries for a block-sparse problem, best by the model first."""
    reason = why_not_blocks(problem)
    if reason is None and device.type != "cpu" and not (configs := ranked(problem, device)):
        reason = f"no config is legal for {problem} on {device.arch}"
    if reason is not None:
        return Offers(refusals=(Refusal(name="triton:bsr", reason=reason),))
    if device.type == "cpu":
        configs = tuple(config for config in INTERPRETED if why_not_config(problem, device, config) is None)
    chosen = configs[: EFFORT[search].configs["triton:blocks"]]
    return Offers(choices=tuple(BlocksChoice.of(problem, device, config) for config in chosen))


@functools.lru_cache(maxsize=256)
def ranked(problem: Problem, device: DeviceInfo) -> tuple[BlocksConfig, ...]:
    """Return legal configs by ``cost``, first the best few of each output tile, some of which reorder rows."""
    legal = [config for config in _pool(problem, device) if why_not_config(problem, device, config) is None]
    legal.sort(key=lambda config: cost(problem, device, config))
    order = sorted((config for config in legal if config.rows == "neighbours"), key=repeats(_kind, MOST_ALIKE))
    ordered = sorted((config for config in legal if config.rows != "neighbours"), key=repeats(_kind, MOST_ORDERED))
    for place, config in enumerate(ordered):
        order.insert((place + 1) * ORDERED_EVERY - 1, config)
    return tuple(order)


def _kind(config: BlocksConfig) -> tuple[object, ...]:
    return config.whole.tile, config.rows


def cost(problem: Problem, device: DeviceInfo, config: BlocksConfig) -> float:
    """Return a figure that grows with the time: bytes of read blocks and panels' zeros, per busy share of the device."""
    sparsity = problem.blocks
    absent = (1 - max(sparsity.density, 0.005)) ** max(config.block_k / sparsity.block_k, 1.0)
    whole = config.whole

    def share(rows: int) -> float:
        """Return the expected share of columns with a block in at least one of ``rows`` grouped rows."""
        excess = absent - absent ** max(rows / sparsity.block_n, 1.0)
        return float(1 - absent + excess * (1 if config.rows == "neighbours" else EXCESS))

    tokens = min(config.block_m, max(problem.m, 1))
    traffic = share(config.block_n) * (1 / tokens + 1 / 256) + share(whole.block_n) / whole.block_n
    programs = tiles_of(problem, whole) * config.split_k
    waves = -(-programs // device.sm_count) * device.sm_count / max(programs, 1)
    # In a skewed weight a long row keeps one program busy after the others end.
    uneven = 1.0 if sparsity.imbalance == "even" else 1 + 0.5 / config.split_k
    steps = (1 + 0.02 * (config.split_k - 1)) * (1 + 4 / config.block_k) * (1 + 0.01 * (4 - config.stages))
    # Two panels are left operands of instructions as wide as all tokens, or right operands of narrow instructions.
    narrow = 1.02 if config.rows == "pairs" and not config.swap else 1.0
    return float(traffic * waves * uneven * steps * narrow)


def _pool(problem: Problem, device: DeviceInfo) -> Iterator[BlocksConfig]:
    overlaps = device.type == "cuda" and can_overlap(device.capability)
    tokens = [block for block in BLOCKS_M if block == LEAST_BLOCK or block < 2 * problem.m]
    for block_m, block_n, block_k in itertools.product(tokens, PANELS_N, PANELS_K):
        elements = block_m * block_n
        warps = 8 if elements >= 128 * 256 else 4 if elements >= 1024 or problem.dtype == torch.float64 else 2
        plain = BlocksConfig(block_m=block_m, block_n=block_n, block_k=block_k, stages=1, warps=warps, pdl=overlaps)
        splits = [s for s in splits_for(tiles_of(problem, plain), device.sm_count) if s <= MOST_SPLITS]
        swaps = (True,) if problem.m <= SMALL_M else (False, True) if block_n >= WARP_GROUP_ROWS else (False,)
        for stages, split_k, swap in itertools.product(STAGES, splits, swaps):
            config = replace(plain, stages=stages, split_k=split_k, swap=swap)
            yield config
            yield replace(config, rows="alike")
            if 2 * block_n <= PANELS_N[-1] and problem.m > SMALL_M:
                yield replace(config, rows="pairs", warps=8 if elements >= 64 * 256 else warps)
