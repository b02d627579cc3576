"""Which kernels of the blocks template are tried for a problem: an order by what limits each."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch

from ....choice import Offers, Refusal
from ....device import DeviceInfo
from ....effort import EFFORT
from ....problem import Problem
from ..arch import can_overlap
from ..configs import splits_for, tiles_of
from ..legality import LEAST_BLOCK
from .choice import BlocksChoice
from .configs import MOST_SPLITS, BlocksConfig, why_not_blocks, why_not_config

BLOCKS_M, PANELS_N, PANELS_K = (16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (16, 32, 64, 128)
STAGES = (4, 3)
FEW_TOKENS = 32
"""Up to so many, the weight is the left operand of the instruction."""
WARP_GROUP_ROWS = 64
"""Rows of the weight that fill a warp group's instruction, so that it may be the left operand for many tokens too."""
MOST_ALIKE = 3
"""Configs of one tile of the result that are tried."""
MOST_ORDERED = 2
"""The same of those that order the rows of the weight, in one way, …"""
ORDERED_EVERY = 4
"""… which is one in so many of the configs that are tried, where the order of rows changes anything."""
EXCESS = 0.75
"""Of the columns that panels of neighbours have beside those of each row, the share that is left where rows are alike: so it is for
blocks at random, and less for most patterns."""
INTERPRETED = (
    BlocksConfig(block_m=16, block_n=16, block_k=16, stages=1, warps=1),
    BlocksConfig(block_m=32, block_n=32, block_k=32, stages=1, warps=1, swap=True),
    BlocksConfig(block_m=16, block_n=16, block_k=32, stages=1, warps=1, split_k=2),
    BlocksConfig(block_m=16, block_n=16, block_k=16, stages=1, warps=1, rows="pairs"),
)
"""What the interpreter tries, to check values."""


def block_offers(problem: Problem, device: DeviceInfo, search: str) -> Offers:
    """The kernels for a block-sparse problem that a search tries, the best by the model first."""
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
    """The legal configs for a GPU, by ``cost``; of each tile of the result the best few first, some that order rows among them."""
    legal = [config for config in _pool(problem, device) if why_not_config(problem, device, config) is None]
    legal.sort(key=lambda config: cost(problem, device, config))
    order = _varied([config for config in legal if config.rows == "neighbours"], MOST_ALIKE)
    ordered = _varied([config for config in legal if config.rows != "neighbours"], MOST_ORDERED)
    for place, config in enumerate(ordered):
        order.insert((place + 1) * ORDERED_EVERY - 1, config)
    return tuple(order)


def _varied(configs: list[BlocksConfig], most: int) -> list[BlocksConfig]:
    """The configs, of each tile and way to order rows the first ``most`` in front."""
    seen: Counter[tuple[object, ...]] = Counter()
    first: list[BlocksConfig] = []
    rest: list[BlocksConfig] = []
    for config in configs:
        kind = (config.whole.tile, config.rows)
        seen[kind] += 1
        (first if seen[kind] <= most else rest).append(config)
    return first + rest


def cost(problem: Problem, device: DeviceInfo, config: BlocksConfig) -> float:
    """A figure that grows with the time: traffic of the blocks that are read, zeros that panels join included, over the share of
    the device that has work."""
    sparsity = problem.sparsity
    assert sparsity is not None
    absent = (1 - max(sparsity.density, 0.005)) ** max(config.block_k / sparsity.block_k, 1.0)
    whole = config.whole

    def share(rows: int) -> float:
        """The share of the columns that some of so many rows have, which are together."""
        excess = absent - absent ** max(rows / sparsity.block_n, 1.0)
        return float(1 - absent + excess * (1 if config.rows == "neighbours" else EXCESS))

    tokens = min(config.block_m, max(problem.m, 1))
    traffic = share(config.block_n) * (1 / tokens + 1 / 256) + share(whole.block_n) / whole.block_n
    programs = tiles_of(problem, whole) * config.split_k
    waves = -(-programs // device.sm_count) * device.sm_count / max(programs, 1)
    # A long row of a skewed weight keeps one program busy while others have ended.
    uneven = 1.0 if sparsity.imbalance == "even" else 1 + 0.5 / config.split_k
    steps = (1 + 0.02 * (config.split_k - 1)) * (1 + 4 / config.block_k) * (1 + 0.01 * (4 - config.stages))
    # Two panels are the left operands of instructions as wide as all tokens, or the right ones of such as are narrow.
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
        swaps = (True,) if problem.m <= FEW_TOKENS else (False, True) if block_n >= WARP_GROUP_ROWS else (False,)
        for stages, split_k, swap in itertools.product(STAGES, splits, swaps):
            config = replace(plain, stages=stages, split_k=split_k, swap=swap)
            yield config
            yield replace(config, rows="alike")
            if 2 * block_n <= PANELS_N[-1] and problem.m > FEW_TOKENS:
                yield replace(config, rows="pairs", warps=8 if elements >= 64 * 256 else warps)
