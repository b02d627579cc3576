"""Kernels for groups of rows that read narrow integers as 32-bit words, and their candidate configs."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction
from ....problem import Problem
from ..arch import can_overlap
from ..artifact import Expected, words_instruction
from ..classes import INT32_LIMIT
from ..configs import Config, Geometry
from ..mixed.words import WordsConfig, WordsKernelChoice, why_not_config, why_not_words, words_reduction, words_resources
from .choice import GroupedChoice, grouped_geometry
from .configs import most_tiles

BLOCKS = ((64, 128, 2), (64, 64, 2), (32, 128, 1), (128, 128, 4), (128, 64, 2), (64, 256, 2), (32, 256, 1))
"""(block_n, block_k, warps) of each candidate."""
STAGES = (3, 4, 6)
LEAST_ROWS, MOST_ROWS = 16, 64
"""Bounds on the rows of a tile. Each tile converts all words again, so single warps do not serve more rows."""
INTERPRETED = WordsConfig(block_m=16, block_n=16, block_k=64, stages=1, warps=1)


@dataclass(frozen=True, kw_only=True)
class WordRowsChoice(GroupedChoice, WordsKernelChoice):
    """Choice of the template for groups of rows with weights read as words."""

    family = "grouped_words"
    template = "grouped/words.py.jinja"

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        assert isinstance(config, WordsConfig)
        return why_not_word_rows(problem, device) or why_not_config(problem, device, config)

    @classmethod
    def divided(cls, problem: Problem, device: DeviceInfo, config: Config) -> Geometry:  # noqa: ARG003 - shared signature
        """Return the geometry: one small program for each possible tile; a multiprocessor holds as many as fit."""
        return grouped_geometry(problem, config, most_tiles(problem, config))

    @classmethod
    def claimed(cls, problem: Problem, where: Geometry) -> Claims:
        """Return the claims; scales multiply sums, so weights are not rounded."""
        return dataclasses.replace(super().claimed(problem, where), weights=None)

    @classmethod
    def reduced(cls, problem: Problem, where: Geometry, config: Config, device: DeviceInfo) -> Reduction | None:
        return words_reduction(problem, where, config, device)

    @property
    def values(self) -> Mapping[str, Any]:
        assert isinstance(self.config, WordsConfig)
        return {**super().values, **self.of_groups, "swap": self.config.swap, "flatten": False}

    def expected(self, device: DeviceInfo) -> Expected:
        assert isinstance(self.config, WordsConfig)
        need = words_resources(self.problem, device, self.config)
        return Expected(instruction=words_instruction(self.problem, warp_group=False), smem_bytes=need.smem_bytes)


def why_not_word_rows(problem: Problem, device: DeviceInfo) -> str | None:
    reason = why_not_words(problem, device)
    if reason is None and problem.scale_b is not None and problem.scale_b.numel >= INT32_LIMIT:
        return f"scale_b {problem.scale_b}: indices into it do not fit 32 bits"
    return reason


@functools.lru_cache(maxsize=256)
def words_configs(problem: Problem, device: DeviceInfo) -> tuple[WordsConfig, ...]:
    """Return the legal configs, likely best first; none if groups have more rows than single warps multiply well."""
    if why_not_word_rows(problem, device) is not None or -(-problem.m // problem.groups) > MOST_ROWS:
        return ()
    return tuple(config for config in _pool(problem, device) if why_not_config(problem, device, config) is None)


def _pool(problem: Problem, device: DeviceInfo) -> Iterator[WordsConfig]:
    if device.type == "cpu":
        yield from (dataclasses.replace(INTERPRETED, swap=swap) for swap in (False, True))
        return
    overlaps = device.type == "cuda" and can_overlap(device.capability)
    rows = max(LEAST_ROWS, 1 << (-(-problem.m // problem.groups) - 1).bit_length())
    # Groups are uneven: some have more rows than the mean.
    heights = [height for height in (rows, 2 * rows) if height <= MOST_ROWS and height < 2 * problem.m]
    for stages, height, (block_n, block_k, warps), swap in itertools.product(STAGES, heights or [rows], BLOCKS, (True, False)):
        yield WordsConfig(block_m=height, block_n=block_n, block_k=block_k, stages=stages, warps=warps, swap=swap, pdl=overlaps)
