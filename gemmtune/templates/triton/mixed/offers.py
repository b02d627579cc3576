"""Which configs of the words template a search tries for a problem, the likely best first."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ....choice import Choice
from ....device import DeviceInfo
from ....problem import Problem
from ..arch import arch_of, can_overlap
from ..configs import splits_for
from .configs import WordsConfig
from .order import ordered_choice, ordered_problem
from .words import why_not_config, why_not_words, words_choice

__all__ = ["WORDS_CHOICES", "words_choices", "words_configs", "words_pool"]

WORDS_CHOICES: dict[str, int | None] = {"quick": 3, "default": 12, "exhaustive": None}
"""How many configs of this template a search tries."""
MOST_ROWS_OF_SINGLE_WARPS = 64
LEAST_ROWS_OF_A_GROUP = 17
SINGLE = (
    (64, 128, 2, 2),
    (128, 128, 2, 1),
    (64, 256, 2, 1),
    (32, 128, 1, 2),
    (32, 256, 1, 1),
    (128, 64, 2, 2),
    (64, 64, 2, 2),
    (32, 64, 1, 2),
    (64, 32, 2, 2),
)
"""(block_n, block_k, warps, steps) where single warps multiply."""
GROUPS = ((64, 128, 4), (128, 128, 4), (128, 128, 8), (256, 128, 8), (128, 256, 8), (32, 128, 4), (64, 64, 4))
"""(block_m, block_n, warps) where a warp group does."""
GROUP_BLOCKS_K = (128, 64, 32)
STAGES = (4, 3, 6)


def words_choices(problem: Problem, device: DeviceInfo, count: int | None) -> Sequence[Choice]:
    """Up to ``count`` choices of the words template, all for None; none where it has nothing."""
    return [
        ordered_choice(problem, device, config) if config.fragments else words_choice(problem, device, config)
        for config in words_configs(problem, device)[:count]
    ]


@functools.lru_cache(maxsize=1024)
def words_configs(problem: Problem, device: DeviceInfo) -> tuple[WordsConfig, ...]:
    """The legal configs, the likely best first."""
    if why_not_words(problem, device) is not None:
        return ()
    copied = ordered_problem(problem)
    legal = [c for c in words_pool(problem, device) if why_not_config(copied if c.fragments else problem, device, c) is None]
    return tuple(legal)


def words_pool(problem: Problem, device: DeviceInfo) -> Iterator[WordsConfig]:
    """Every config that this problem could want on this device, legal or not."""
    overlaps = device.type == "cuda" and can_overlap(device.capability)
    for config in (*_single(problem), *_groups(problem, device)):
        tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n)
        for split_k in splits_for(tiles, device.sm_count):
            yield replace(config, split_k=split_k, pdl=overlaps)


def _single(problem: Problem) -> Iterator[WordsConfig]:
    if problem.m > MOST_ROWS_OF_SINGLE_WARPS:
        return
    rows = max(16, 1 << (problem.m - 1).bit_length())
    for block_n, block_k, warps, steps in SINGLE:
        for stages in STAGES:
            yield WordsConfig(block_m=rows, block_n=block_n, block_k=block_k, stages=stages, warps=warps, steps=steps)


def _groups(problem: Problem, device: DeviceInfo) -> Iterator[WordsConfig]:
    if problem.m < LEAST_ROWS_OF_A_GROUP or not arch_of(device).warp_group or device.capability >= 100:
        return
    for block_m, block_n, warps in GROUPS:
        for block_k in GROUP_BLOCKS_K:
            for stages in STAGES:
                yield WordsConfig(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, warps=warps, fragments=True)
