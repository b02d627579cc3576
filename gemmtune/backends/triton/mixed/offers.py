"""Which configs of the words template a search tries for a problem, the likely best first, and which choice is recommended."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ....choice import Choice
from ....device import DeviceInfo
from ....filters import HEURISTIC
from ....problem import Problem
from ..arch import arch_of, can_overlap
from ..configs import splits_for
from ..legality import TENSOR_MEMORY
from .configs import WordsConfig
from .order import ordered_choice, ordered_problem
from .preferred import preferred_configs
from .words import WordsChoice, why_not_config, why_not_words

__all__ = ["with_recommendation", "words_choices", "words_configs", "words_pool"]

MOST_ROWS_OF_SINGLE_WARPS = 64
LEAST_ROWS_OF_A_GROUP = 17
SINGLE = ((64, 128, 2), (128, 128, 4), (128, 128, 2), (64, 128, 4), (64, 256, 2), (128, 256, 4), (32, 128, 1), (64, 64, 2))
"""(block_n, block_k, warps) where single warps multiply."""
GROUPS = ((64, 128, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (32, 128, 4), (64, 64, 4))
"""(block_m, block_n, warps) where a warp group does."""
GROUP_BLOCKS_K = (128, 64)
STAGES = (3, 4, 6)
LEAST_KNOWN_SIDE = 4096


def words_choices(problem: Problem, device: DeviceInfo, count: int | None) -> Sequence[Choice]:
    """Up to ``count`` choices of the words template, all for None; none where it has nothing."""
    return [
        ordered_choice(problem, device, config) if config.fragments else WordsChoice.of(problem, device, config)
        for config in words_configs(problem, device, count)
    ]


def with_recommendation(problem: Problem, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """The choices, best first, of which the first says so in its ``info`` where shapes like the problem's are known well: mixed_mm
    in float16 of up to 64 rows, N and K of 4096 or more (for one row multiples of 16 too)."""
    known = problem.widens_b and problem.dtype == torch.float16 and problem.m <= MOST_ROWS_OF_SINGLE_WARPS
    sizes = (problem.n, problem.k)
    if not choices or not known or min(sizes) < LEAST_KNOWN_SIDE or (problem.m == 1 and any(size % 16 for size in sizes)):
        return tuple(choices)
    return (replace(choices[0], info={**choices[0].info, HEURISTIC: True}), *choices[1:])


@functools.lru_cache(maxsize=1024)
def words_configs(problem: Problem, device: DeviceInfo, count: int | None = None) -> tuple[WordsConfig, ...]:
    """Up to ``count`` legal configs, all for None, the likely best first."""
    if why_not_words(problem, device) is not None:
        return ()
    copied = ordered_problem(problem)
    pool = dict.fromkeys(words_pool(problem, device))
    legal = (c for c in pool if why_not_config(copied if c.fragments else problem, device, c) is None)
    return tuple(itertools.islice(legal, count))


def words_pool(problem: Problem, device: DeviceInfo) -> Iterator[WordsConfig]:
    """Every config that this problem could want on this device, legal or not, some of them twice."""
    overlaps = device.type == "cuda" and can_overlap(device.capability)
    groups = arch_of(device).warp_group and device.capability < TENSOR_MEMORY
    for config in preferred_configs(problem, device, groups=groups):
        yield replace(config, pdl=overlaps)
    for config in (*_single(problem), *(_groups(problem) if groups else ())):
        tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n)
        for split_k in splits_for(tiles, device.sm_count):
            yield replace(config, split_k=split_k, pdl=overlaps)


def _single(problem: Problem) -> Iterator[WordsConfig]:
    if problem.m > MOST_ROWS_OF_SINGLE_WARPS:
        return
    rows = max(16, 1 << (problem.m - 1).bit_length())
    for stages, (block_n, block_k, warps), steps, swap in itertools.product(STAGES, SINGLE, (1, 2), (True, False)):
        yield WordsConfig(block_m=rows, block_n=block_n, block_k=block_k, stages=stages, warps=warps, steps=steps, swap=swap)


def _groups(problem: Problem) -> Iterator[WordsConfig]:
    if problem.m < LEAST_ROWS_OF_A_GROUP:
        return
    for (block_m, block_n, warps), block_k, stages in itertools.product(GROUPS, GROUP_BLOCKS_K, STAGES):
        yield WordsConfig(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, warps=warps, fragments=True)
