"""Shapes of the kernels for few tokens: which are legal, and the model that ranks them.

The model's constants are rates of an H200, and none is fitted to this kernel yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....device import DeviceInfo
from ....problem import Problem
from ..bsr.configs import FRAGMENT, FRAGMENT_BYTES
from ..bsr.weights import block_of
from ..hopper import SMEM_BYTES, SYSTEM_BYTES, registers_per_thread
from .packing import panels_of

TOKENS = (8, 16, 32)
"""The tokens of a kernel: whole products of a warp."""
BASE_REGISTERS = 20
"""What a thread needs beside fragments, x and sums: numbers, and addresses."""
MOST_RESIDENT_WARPS = 32
"""Warps of a multiprocessor that are planned with: more of them leave too few registers for loads on their way."""
L1_BYTES = 160 * 1024
"""What shared memory leaves to x of the memory that both have."""
SKEW = 4.0
"""The blocks of the longest row, over the mean, that are assumed of a skewed weight."""
LAUNCH_US, LATENCY_US = 2.0, 0.8
"""What a launch takes at the least, and a load out of memory."""
SUM_US = 0.02
"""What each warp adds for its sums, which are added up."""
DRAM_GBPS = 4300.0
HALF_RATE_BYTES = 2 * 2**20
"""The bytes with which, on their way to all multiprocessors, half of the rate is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A panel of 16 rows by ``block_n`` tokens for ``warps`` that divide its blocks.

    A warp has ``stages`` on their way, of ``stage_fragments`` of 16 by 16 each, which are neighbours in memory.
    """

    block_n: int
    warps: int
    stages: int
    stage_fragments: int

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block, which has the sums of each warp alone, in lines with a gap behind them."""
        return self.warps * 4 * (FRAGMENT * self.block_n + 4 * max(FRAGMENT, self.block_n))

    @property
    def registers(self) -> int:
        """About what a thread needs."""
        x = self.stage_fragments * self.block_n // 4
        return BASE_REGISTERS + 4 * self.stages * self.stage_fragments + x + self.block_n // 2 + self.stage_fragments

    @property
    def blocks_per_sm(self) -> int:
        """The blocks that a multiprocessor has room for, as many as are planned with."""
        beside_x = (SMEM_BYTES + SYSTEM_BYTES - L1_BYTES) // (self.shared_bytes + SYSTEM_BYTES)
        most = max(min(MOST_RESIDENT_WARPS // self.warps, beside_x), 1)
        return next((n for n in range(most, 1, -1) if self.registers <= registers_per_thread(self.threads, n)), 1)

    @property
    def block_k(self) -> int:
        """The elements of K whose blocks the warps multiply at a time."""
        return self.warps * self.stage_fragments * FRAGMENT

    def __str__(self) -> str:
        return f"{FRAGMENT}x{self.block_n}x{self.block_k}_s{self.stages}_w{self.warps}"


SIZES = ((4, 1, 4), (8, 1, 4), (16, 1, 4), (4, 2, 4), (8, 2, 4), (8, 4, 4), (4, 1, 8), (8, 1, 8), (8, 1, 2))
"""Warps, stages, and fragments of a stage."""
SHAPES: tuple[Shape, ...] = tuple(
    Shape(block_n=block_n, warps=warps, stages=stages, stage_fragments=stage_fragments)
    for block_n in TOKENS
    for warps, stages, stage_fragments in SIZES
)
"""More on their way for each warp, or more warps: many of them for long rows, and where there are few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A shape, and what a launch is told: with ``pdl`` it may begin before the one before it has ended."""

    shape: Shape
    pdl: bool = False

    def __str__(self) -> str:
        return f"{self.shape}{'_pdl' * self.pdl}"


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem with which ``why_not`` found nothing wrong, or None."""
    shape = config.shape
    if problem.m > shape.block_n:
        return f"x has {problem.m} tokens, the kernel {shape.block_n}"
    if not loads_along_k(problem) and shape.block_n < FRAGMENT:
        return f"tokens that are neighbours in memory are loaded in pairs, {FRAGMENT} for a warp, the kernel has {shape.block_n}"
    return device.why_no_smem(shape.shared_bytes)


def loads_along_k(problem: Problem) -> bool | None:
    """Whether a lane loads neighbours of a token along K, as many as it multiplies of a block, or else pairs of tokens.

    None for an x that can be loaded in neither way.
    """
    (row, col), (tokens, _), offset = problem.a.stride, problem.a.size, problem.a.offset
    together = block_of(problem) // 4
    if col == 1 and (tokens == 1 or row % together == 0) and offset % together == 0:
        return True
    return False if row == 1 and tokens % 2 == 0 and col % 2 == 0 and offset % 2 == 0 else None


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    """What a launch reads, at which rate; and what the longest row takes, whose loads wait for those before."""
    shape, sparsity, panels = config.shape, problem.sparsity, panels_of(problem.n)
    assert sparsity is not None
    most = problem.k / FRAGMENT  # fragments of a panel that has all blocks
    mean = sparsity.density * most
    longest = min(SKEW * mean, most) if sparsity.imbalance == "skewed" else mean
    resident = min(shape.blocks_per_sm, -(-panels // device.sm_count))
    held = min(shape.warps * shape.stages * shape.stage_fragments, max(mean, 1.0)) * FRAGMENT_BYTES
    on_their_way = min(panels, device.sm_count * resident) * held
    rate = DRAM_GBPS * on_their_way / (on_their_way + HALF_RATE_BYTES)
    # Blocks that begin where others have ended even out what each multiprocessor has, but for the last ones.
    each = -(-panels // device.sm_count)
    uneven = each * device.sm_count / panels if each <= shape.blocks_per_sm else 1 + 0.25 * resident * device.sm_count / panels
    rounds = -(-longest // (shape.warps * shape.stages * shape.stage_fragments))
    moved = mean * panels * FRAGMENT_BYTES + 2.0 * problem.k * problem.m + problem.out.dtype.itemsize * problem.m * problem.n
    return LAUNCH_US + LATENCY_US + SUM_US * shape.warps + max(moved / rate / 1e3 * uneven, rounds * LATENCY_US)


def candidates(problem: Problem, device: DeviceInfo) -> list[Config]:
    """The shapes of the fewest tokens that are enough, which begin early; best first."""
    legal = [shape.block_n for shape in SHAPES if why_not_config(problem, device, Config(shape=shape)) is None]
    found = [Config(shape=shape, pdl=True) for shape in SHAPES if shape.block_n == min(legal, default=TOKENS[-1])]
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), str(config)))
