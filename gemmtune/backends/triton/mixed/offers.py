"""Which configs of the words template a search tries for a problem, the likely best first, and which choice is recommended."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from ....choice import Choice
from ....device import DeviceInfo
from ....filters import HEURISTIC
from ....problem import Problem
from ..arch import arch_of, can_overlap
from ..configs import SPLITS, splits_for, tiles_of
from ..legality import TENSOR_MEMORY
from .words import OrderedChoice, WordsChoice, WordsConfig, ordered_problem, why_not_config, why_not_words, word_format

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
        (OrderedChoice if config.fragments else WordsChoice).of(problem, device, config)
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
    pool = dict.fromkeys(_pool(problem, device))
    legal = (c for c in pool if why_not_config(copied if c.fragments else problem, device, c) is None)
    return tuple(itertools.islice(legal, count))


def _pool(problem: Problem, device: DeviceInfo) -> Iterator[WordsConfig]:
    """Every config that this problem could want on this device, legal or not, some of them twice."""
    overlaps = device.type == "cuda" and can_overlap(device.capability)
    groups = arch_of(device).warp_group and device.capability < TENSOR_MEMORY
    for config in preferred_configs(problem, device, groups=groups):
        yield replace(config, pdl=overlaps)
    for config in (*_single(problem), *(_groups(problem) if groups else ())):
        for split_k in splits_for(tiles_of(problem, config), device.sm_count):
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


@dataclass(frozen=True, slots=True)
class Row:
    """A config that was among the fastest of its kind, so that a short search holds it. ``programs``: how many of them each
    multiprocessor gets, for which K is split.

    Measured on an H200 with N = K = 8192: float16 with int8 and a scale for each column, and with int4 and groups of 128; some with
    bfloat16 or zero points.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    programs: float
    swap: bool = True
    steps: int = 1


FEW_ROWS, SOME_ROWS = 16, 64
"""Rows of a up to which the first and the second table of a pair hold; a third one holds for more."""
BYTES_FEW = (
    Row(16, 64, 128, 3, 2, 4, swap=False),
    Row(16, 64, 128, 3, 2, 4),
    Row(16, 128, 128, 6, 4, 1, swap=False),
    Row(16, 64, 128, 3, 4, 2, swap=False, steps=2),
    Row(16, 64, 128, 3, 2, 2, steps=2),
    Row(16, 64, 256, 3, 2, 2),
    Row(16, 128, 256, 3, 4, 2, swap=False),
    Row(16, 32, 128, 2, 1, 16),
)
NIBBLES_FEW = (
    Row(16, 64, 128, 3, 2, 4),
    Row(16, 128, 128, 4, 4, 2, swap=False),
    Row(16, 64, 128, 3, 2, 4, swap=False, steps=2),
    Row(16, 64, 128, 2, 2, 8),
    Row(16, 128, 128, 4, 4, 4, swap=False),
    Row(16, 32, 128, 2, 1, 8, steps=2),
    Row(16, 64, 64, 4, 2, 4, steps=2),
)
BFLOAT16_BYTES_FEW = (
    Row(16, 128, 256, 4, 4, 1, swap=False),
    Row(16, 64, 256, 3, 4, 2, swap=False, steps=2),
    Row(16, 64, 256, 3, 2, 2, steps=2),
)
DEEP_NIBBLES_FEW = (
    Row(16, 64, 128, 6, 2, 2, swap=False),
    Row(16, 128, 128, 6, 4, 1, swap=False, steps=2),
    Row(16, 64, 128, 6, 2, 4, swap=False),
    Row(16, 128, 128, 8, 2, 2),
)
"""Configs for bfloat16 and for zero points, which take more registers and time for each word."""
SINGLE_SOME = (
    Row(16, 64, 128, 3, 2, 4),
    Row(16, 128, 128, 4, 2, 2),
)
"""Configs without warp groups, or beside them; as the tables for few rows, with as many rows as there are."""
BYTES_SOME = (
    Row(64, 64, 128, 3, 4, 3),
    Row(64, 64, 128, 3, 4, 2),
    Row(64, 128, 64, 4, 4, 1.5),
    Row(32, 128, 128, 6, 4, 2),
    Row(64, 64, 128, 3, 4, 4),
    Row(64, 128, 64, 4, 4, 2),
)
NIBBLES_SOME = (
    Row(64, 128, 128, 4, 4, 2),
    Row(32, 128, 128, 4, 4, 2),
    Row(64, 128, 64, 4, 4, 2),
    Row(64, 128, 128, 4, 4, 1.5),
    Row(64, 64, 64, 6, 4, 3),
    Row(32, 128, 64, 4, 4, 3),
)
BYTES_MORE = (
    Row(64, 128, 128, 4, 4, 2),
    Row(128, 128, 64, 4, 8, 1),
    Row(128, 128, 64, 3, 4, 2),
    Row(128, 128, 64, 4, 4, 1),
    Row(128, 128, 128, 3, 4, 1),
    Row(128, 256, 128, 3, 8, 1),
    Row(64, 128, 64, 4, 4, 2),
    Row(128, 128, 32, 6, 4, 2),
)
NIBBLES_MORE = (
    Row(64, 128, 128, 3, 4, 2),
    Row(64, 128, 128, 4, 4, 2),
    Row(128, 128, 128, 4, 8, 1),
    Row(128, 128, 128, 3, 8, 1),
    Row(128, 128, 64, 6, 8, 1),
    Row(64, 64, 128, 3, 4, 2),
    Row(128, 128, 128, 3, 8, 2),
)
ROUNDING = 1.05
"""Programs may be more than whole rounds by so much: a few multiprocessors with one more cost less than one split fewer for all."""


def preferred_configs(problem: Problem, device: DeviceInfo, *, groups: bool) -> Iterator[WordsConfig]:
    """The configs for the problem, legal or not, the best first. Only with ``groups`` those for warp groups."""
    if problem.m <= FEW_ROWS:
        yield from (_config(problem, device, row, rows=FEW_ROWS) for row in _few(problem))
        return
    bytes_ = word_format(problem).bits == 8
    if groups:
        some, more = (BYTES_SOME, BYTES_MORE) if bytes_ else (NIBBLES_SOME, NIBBLES_MORE)
        yield from (_config(problem, device, row, fragments=True) for row in (some if problem.m <= SOME_ROWS else more))
    if problem.m <= SOME_ROWS:
        rows = 1 << (problem.m - 1).bit_length()
        yield from (_config(problem, device, row, rows=rows) for row in (*SINGLE_SOME, *_few(problem)))


def _few(problem: Problem) -> tuple[Row, ...]:
    half = problem.dtype == torch.float16
    if word_format(problem).bits == 8:
        return BYTES_FEW if half else BFLOAT16_BYTES_FEW + BYTES_FEW
    return NIBBLES_FEW + DEEP_NIBBLES_FEW if half and problem.zero_b is None else DEEP_NIBBLES_FEW + NIBBLES_FEW


def _config(problem: Problem, device: DeviceInfo, row: Row, *, rows: int = 0, fragments: bool = False) -> WordsConfig:
    """The row's config, for so many ``rows`` of a where that is not 0."""
    fields = asdict(row) | {"block_m": rows or row.block_m}
    programs = fields.pop("programs")
    config = WordsConfig(**fields, fragments=fragments)
    most = ROUNDING * programs * max(device.sm_count, 1) / tiles_of(problem, config)
    blocks = problem.k // row.block_k
    # No split may be without work.
    fitting = (s for s in SPLITS if s <= min(most, blocks) and -(-blocks // -(-blocks // s)) == s)
    return replace(config, split_k=max(fitting, default=1))
