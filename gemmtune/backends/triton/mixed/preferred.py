"""Configs of the words template that were the fastest of their kind, so that a short search holds them.

Measured on an H200 with N = K = 8192: float16 with int8 and a scale for each column, and with int4 and groups of 128; some with
bfloat16 or zero points.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ....device import DeviceInfo
from ....problem import Problem
from ..configs import SPLITS
from .configs import WordsConfig, word_format

__all__ = ["preferred_configs"]


@dataclass(frozen=True, slots=True)
class Row:
    """One config. ``programs``: how many of them each multiprocessor gets, for which K is split."""

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
"""For bfloat16 and for zero points, which take more registers and time for each word."""
SINGLE_SOME = (
    Row(16, 64, 128, 3, 2, 4),
    Row(16, 128, 128, 4, 2, 2),
)
"""Without warp groups, or beside them; as the tables for few rows, with as many rows as there are."""
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
    config = WordsConfig(
        block_m=rows or row.block_m,
        block_n=row.block_n,
        block_k=row.block_k,
        stages=row.stages,
        warps=row.warps,
        swap=row.swap,
        steps=row.steps,
        fragments=fragments,
    )
    tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n)
    most = ROUNDING * row.programs * max(device.sm_count, 1) / tiles
    return replace(config, split_k=max((s for s in SPLITS if s <= most and _whole(problem.k // row.block_k, s)), default=1))


def _whole(blocks: int, splits: int) -> bool:
    """Do so many blocks leave no split without work?"""
    return blocks >= splits and -(-blocks // -(-blocks // splits)) == splits
