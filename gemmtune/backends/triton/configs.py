"""Configs of the mm template: the parameters of one instance, the pool they come from, and how one divides a problem.

Pure: nothing here needs a GPU or Triton.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One instance of the mm template.

    A program computes ``block_m`` × ``block_n`` elements, ``block_k`` of the summed dimension at a time, with ``warps`` warps;
    ``stages`` is Triton's num_stages. ``group_m`` tile rows are worked off together; ``split_k`` programs share one tile's sum.
    ``pdl``: the launch may overlap the end of the kernel before it (programmatic dependent launch, sm90 and newer).
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    group_m: int = 8
    split_k: int = 1
    pdl: bool = False

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}: got {value}, expected a power of two")
        for name in ("stages", "group_m", "split_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")

    def __str__(self) -> str:
        text = f"{self.block_m}x{self.block_n}x{self.block_k}_s{self.stages}_w{self.warps}"
        text += f"_g{self.group_m}" if self.group_m != GROUP_M else ""
        text += f"_k{self.split_k}" if self.split_k > 1 else ""
        return text + self.variant + "_pdl" * self.pdl

    @property
    def variant(self) -> str:
        """What the name of a family's own config has beside that of the mm template."""
        return ""

    @property
    def compile_options(self) -> Mapping[str, int]:
        """What the compiler is told beside stages and warps."""
        return {}

    @property
    def tile(self) -> tuple[int, int]:
        """(block_m, block_n)."""
        return (self.block_m, self.block_n)


GROUP_M = 8
"""The usual number of tile rows of a group; a name shows only another one."""
BLOCKS_M = (16, 32, 64, 128, 256)
BLOCKS_N = (16, 32, 64, 128, 256)
BLOCKS_K = (16, 32, 64, 128, 256)
STAGES = (1, 2, 3, 4, 5, 6)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
DEEPEST = 1024
"""Elements of the summed dimension on their way at a time: more is never in time."""
LEAST_SHARE = 3
"""Splitting that leaves all but a third of the multiprocessors idle is left out, unless it is the most there is."""
MOST_WAVES = 4
"""Programs for each multiprocessor beyond which splitting only adds partial sums."""
LEAST_ELEMENTS_PER_THREAD, MOST_ELEMENTS_PER_THREAD = 2, 128
"""Accumulators of a thread: fewer leave the warps without work, more do not fit its registers."""
FEW_SPLITS = 8
"""Up to here one program adds up all splits of a tile."""


@functools.cache
def pool() -> tuple[Config, ...]:
    """Every config without splits that some problem on some device could want, by size of tile."""
    return tuple(
        Config(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, warps=warps)
        for block_m, block_n, block_k in itertools.product(BLOCKS_M, BLOCKS_N, BLOCKS_K)
        for warps in (1, 2, 4, 8)
        if LEAST_ELEMENTS_PER_THREAD <= block_m * block_n // (32 * warps) <= MOST_ELEMENTS_PER_THREAD
        for stages in STAGES
        if block_k * stages <= DEEPEST
    )


def splits_for(tiles: int, multiprocessors: int) -> tuple[int, ...]:
    """Numbers of splits worth a look, 1 among them: enough to give a good part of the device work, and not many times too many."""
    least, most = multiprocessors // LEAST_SHARE, MOST_WAVES * multiprocessors
    return tuple(s for s in SPLITS if s == 1 or (least <= tiles * s <= most) or s == SPLITS[-1] <= most // tiles)


def unalike(configs: Iterable[Config], count: int | None, most: int) -> list[Config]:
    """The first ``count`` configs of which at most ``most`` differ in their stages alone; all for None."""
    if count is None:
        return list(configs)
    chosen: list[Config] = []
    alike: Counter[tuple[int, ...]] = Counter()
    for config in configs:
        shape = (*config.tile, config.block_k, config.warps, config.split_k)
        if len(chosen) < count and alike[shape] < most:
            chosen.append(config)
            alike[shape] += 1
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The grid of a launch and the integers that the kernel takes beside sizes and strides."""

    tiles: int
    splits: int
    k_per_split: int
    splits_per_group: int
    group_m: int
    programs: int | None = None
    """Programs that are launched and go from tile to tile; None: one for each part of the summed dimension of each tile."""

    @property
    def groups(self) -> int:
        """Groups of splits, each added up by one program."""
        return -(-self.splits // self.splits_per_group)

    @property
    def slots(self) -> int:
        """Partial sums that are stored, each of the size of a tile: one for each split, and one for each group."""
        return self.tiles * (self.splits + self.groups) if self.splits > 1 else 0

    @property
    def counters(self) -> int:
        """Counters of arrivals: for each tile one of each group and one of the groups."""
        return self.tiles * (self.groups + 1) if self.splits > 1 else 0

    @property
    def grid(self) -> tuple[int, int, int]:
        """The programs of a launch."""
        return (self.tiles, self.splits, 1) if self.programs is None else (self.programs, 1, 1)


def tiles_of(problem: Problem, config: Config) -> int:
    """Tiles of the result, over the whole batch."""
    return -(-problem.m // config.block_m) * -(-problem.n // config.block_n) * problem.batch


def blocks_along_k(problem: Problem, block_k: int) -> int:
    """Steps of the loops of one program without splits; each product has whole blocks of its own."""
    return sum(-(-k // block_k) for k in problem.summed)


def geometry(problem: Problem, config: Config) -> Geometry:
    """The launch of ``config`` on ``problem``. No split is empty: where K has too few blocks there are fewer splits."""
    blocks = max(blocks_along_k(problem, config.block_k), 1)
    blocks_per_split = -(-blocks // config.split_k)
    splits = -(-blocks // blocks_per_split)
    return Geometry(
        tiles=tiles_of(problem, config),
        splits=splits,
        splits_per_group=splits if splits <= FEW_SPLITS else math.isqrt(splits - 1) + 1,
        k_per_split=blocks_per_split * config.block_k,
        group_m=config.group_m,
    )
