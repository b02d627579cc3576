"""Configs of the mm template: the parameters of one instance, the pool of candidates, and the geometry of a launch."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...device import DeviceInfo
from ...problem import Problem
from .arch import arch_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Parameters of one instance of the mm template.

    A program computes a tile of ``block_m`` × ``block_n`` with ``warps`` warps, ``block_k`` elements of K per step. ``stages`` is
    num_stages. Tile rows are ordered in groups of ``group_m``. ``split_k`` programs share a tile's sum. ``pdl``: the launch may
    overlap the end of the previous kernel (programmatic dependent launch, sm90 and newer).
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
        """Suffix that a family's own config adds to the name of an mm config."""
        return ""

    @property
    def compile_options(self) -> Mapping[str, int]:
        """Options for the compiler, in addition to stages and warps."""
        return {}

    @property
    def tile(self) -> tuple[int, int]:
        return (self.block_m, self.block_n)


GROUP_M = 8
"""Default number of tile rows in a group; a config's name shows only other values."""
BLOCKS_M = (16, 32, 64, 128, 256)
BLOCKS_N = (16, 32, 64, 128, 256)
BLOCKS_K = (16, 32, 64, 128, 256)
STAGES = (1, 2, 3, 4, 5, 6)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
DEEPEST = 1024
"""Maximum elements of K in flight (block_k × stages); deeper prefetch brings no benefit."""
LEAST_SHARE = 3
"""Split-K must occupy at least one multiprocessor in this many, except at the largest number of splits."""
MOST_WAVES = 4
"""Programs per multiprocessor above which more splits only add partial sums."""
LEAST_ELEMENTS_PER_THREAD, MOST_ELEMENTS_PER_THREAD = 2, 128
"""Accumulators of one thread: fewer leave warps idle, more exceed its registers."""
MOST_DIRECT_SPLITS = 8
"""Most splits that one program adds up for a tile; above it, splits are added in groups."""


@functools.cache
def pool() -> tuple[Config, ...]:
    """Return every config without split-K that some problem on some device may need, ordered by tile size."""
    return tuple(
        Config(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, warps=warps)
        for block_m, block_n, block_k in itertools.product(BLOCKS_M, BLOCKS_N, BLOCKS_K)
        for warps in (1, 2, 4, 8)
        if LEAST_ELEMENTS_PER_THREAD <= block_m * block_n // (32 * warps) <= MOST_ELEMENTS_PER_THREAD
        for stages in STAGES
        if block_k * stages <= DEEPEST
    )


def splits_for(tiles: int, multiprocessors: int) -> tuple[int, ...]:
    """Return 1 and the numbers of splits that occupy much of the device with at most ``MOST_WAVES`` programs per multiprocessor."""
    least, most = multiprocessors // LEAST_SHARE, MOST_WAVES * multiprocessors
    return tuple(s for s in SPLITS if s == 1 or (least <= tiles * s <= most) or s == SPLITS[-1] <= most // tiles)


def unalike(configs: Iterable[Config], count: int | None, most: int) -> list[Config]:
    """Return the first ``count`` configs (None: all), at most ``most`` of which differ only in stages or other minor options."""
    if count is None:
        return list(configs)
    repeated = repeats(lambda config: (*config.tile, config.block_k, config.warps, config.split_k), most)
    return [config for config in configs if not repeated(config)][:count]


def repeats(kind: Callable[[Any], Hashable], most: int) -> Callable[[Any], bool]:
    """Return a function that is True after ``most`` configs of a kind. As a key of a sort it puts these in front."""
    seen: Counter[Hashable] = Counter()

    def repeated(config: Any) -> bool:
        seen[kind(config)] += 1
        return seen[kind(config)] > most

    return repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Grid of a launch, and the integer arguments other than sizes and strides."""

    tiles: int
    splits: int
    k_per_split: int
    splits_per_group: int
    group_m: int
    programs: int | None = None
    """Programs launched by a persistent kernel. None launches one for each tile and split."""

    @property
    def groups(self) -> int:
        """Groups of splits; one program adds up each group."""
        return -(-self.splits // self.splits_per_group)

    @property
    def slots(self) -> int:
        """Tile-sized partial sums in the workspace: one for each split and one for each group."""
        return self.tiles * (self.splits + self.groups) if self.splits > 1 else 0

    @property
    def counters(self) -> int:
        """Arrival counters: for each tile one per group, and one for all groups."""
        return self.tiles * (self.groups + 1) if self.splits > 1 else 0

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.tiles, self.splits, 1) if self.programs is None else (self.programs, 1, 1)


def tiles_of(problem: Problem, config: Config) -> int:
    """Return the number of output tiles over the whole batch."""
    return -(-problem.m // config.block_m) * -(-problem.n // config.block_n) * problem.batch


def blocks_along_k(problem: Problem, block_k: int) -> int:
    """Return the loop steps of one program without split-K; each product rounds its own K up to whole blocks."""
    return sum(-(-k // block_k) for k in problem.summed)


def geometry(problem: Problem, config: Config) -> Geometry:
    """Return the launch geometry of ``config`` on ``problem``, with fewer splits if K has too few blocks for all."""
    blocks = max(blocks_along_k(problem, config.block_k), 1)
    blocks_per_split = -(-blocks // config.split_k)
    splits = -(-blocks // blocks_per_split)
    return Geometry(
        tiles=tiles_of(problem, config),
        splits=splits,
        splits_per_group=splits if splits <= MOST_DIRECT_SPLITS else math.isqrt(splits - 1) + 1,
        k_per_split=blocks_per_split * config.block_k,
        group_m=config.group_m,
    )


BASE_REGISTERS = 32
"""Registers for addresses, masks and loop counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Needs of a config: an upper bound of its shared memory, and an estimate of one thread's registers."""

    smem_bytes: int
    registers: int

    def why_not_on(self, device: DeviceInfo) -> str | None:
        """Return which resource the device lacks, or None."""
        most = arch_of(device).registers_per_thread
        lacking = f"registers: needs about {self.registers} for each thread, {device.arch} has {most}"
        return device.why_no_smem(self.smem_bytes) or (lacking if self.registers > most else None)


def most_fma_elements(problem: Problem, config: Config) -> int:
    """Return the most accumulators per thread with which an FMA kernel, on every architecture, keeps fragments in registers."""
    if config.block_k > 32:
        return 0
    if problem.dtype.itemsize <= 2 or problem.widens_b:
        return 512 // config.block_k
    return 64 if problem.dtype.itemsize == 4 else 32


def fragment_registers(config: Config, itemsize: int, warp_size: int) -> int:
    """Return the registers of the operand fragments that a warp of an mma holds at a time."""
    warps_m = min(config.warps, max(config.block_m // 16, 1))
    warps_n = max(config.warps // warps_m, 1)
    rows, cols = config.block_m // warps_m, max(config.block_n // warps_n, 8)
    return (rows + cols) * config.block_k * itemsize // 4 // warp_size
