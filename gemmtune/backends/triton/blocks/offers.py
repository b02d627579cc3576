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
INTERPRETED = (
    BlocksConfig(block_m=16, block_n=16, block_k=16, stages=1, warps=1),
    BlocksConfig(block_m=32, block_n=32, block_k=32, stages=1, warps=1, swap=True),
    BlocksConfig(block_m=16, block_n=16, block_k=32, stages=1, warps=1, split_k=2),
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
    """The legal configs for a GPU, by ``cost``; of each tile of the result the best few first."""
    legal = [config for config in _pool(problem, device) if why_not_config(problem, device, config) is None]
    legal.sort(key=lambda config: cost(problem, device, config))
    seen: Counter[tuple[int, int]] = Counter()
    first: list[BlocksConfig] = []
    rest: list[BlocksConfig] = []
    for config in legal:
        seen[config.tile] += 1
        (first if seen[config.tile] <= MOST_ALIKE else rest).append(config)
    return (*first, *rest)


def cost(problem: Problem, device: DeviceInfo, config: BlocksConfig) -> float:
    """A figure that grows with the time: traffic of the blocks that are read, zeros that panels join included, over the share of
    the device that has work."""
    sparsity = problem.sparsity
    assert sparsity is not None
    joined = max(config.block_n / sparsity.block_n, 1.0) * max(config.block_k / sparsity.block_k, 1.0)
    density = 1 - (1 - max(sparsity.density, 0.005)) ** joined
    rows = min(config.block_m, max(problem.m, 1))
    traffic = density * (1 / rows + 1 / config.block_n + 1 / 256)
    programs = tiles_of(problem, config) * config.split_k
    waves = -(-programs // device.sm_count) * device.sm_count / max(programs, 1)
    # A long row of a skewed weight keeps one program busy while others have ended.
    uneven = 1.0 if sparsity.imbalance == "even" else 1 + 0.5 / config.split_k
    steps = (1 + 0.02 * (config.split_k - 1)) * (1 + 4 / config.block_k) * (1 + 0.01 * (4 - config.stages))
    return float(traffic * waves * uneven * steps)


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
            yield replace(plain, stages=stages, split_k=split_k, swap=swap)
