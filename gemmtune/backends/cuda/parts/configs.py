"""A config: what is compiled, a ``Shape`` of the kernel, and what a launch is told. One predicate says whether it is legal."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ....device import DeviceInfo
from ....problem import Problem
from ...by_parts import FEW_TERMS, why_not_one_by_one
from ..boxes import by_k, operands_of
from ..hopper import BARRIER_BYTES, MOST_CLUSTER, TMA_BYTES, WGMMA_M

BLOCK_K = 32
"""Elements of K in a stage: a line of 128 bytes of float32, and lines of 64 bytes of each part."""
PARTS = 3
LINE_BYTES = 2 * BLOCK_K
PLANE_LINES = 8
"""What the lines of a plane are padded to a multiple of: the pattern of its swizzle repeats itself after them."""
ALIGNED = TMA_BYTES // 4
"""Elements that addresses and pitches are multiples of for TMA."""
FEW_STEPS = FEW_TERMS // BLOCK_K
"""The steps whose sum is gathered in shared memory at once, where it is."""
MOST_TILES = 2**28
GATHERED_STEPS, GATHERING_N = 16, 64
"""The steps of K whose sum is added to a tile's at once, in tiles of at most so many columns: others have no registers for it."""
SIDE = 64
"""Lines, and elements along K, that a block of the splitting kernel takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tile of ``block_m`` by ``block_n`` sums with so many ``stages`` of BLOCK_K; ``cluster_k`` blocks of a cluster divide K.

    With two ``halves`` of the columns, one is multiplied while the other one's sums are added. ``keeps``: sums are gathered in
    shared memory, as wide tiles have no registers for it.
    """

    block_m: int
    block_n: int
    stages: int
    cluster_k: int = 1
    halves: int = 1
    keeps: bool = False

    @property
    def warp_groups(self) -> int:
        """The warp groups that multiply."""
        return self.block_m // WGMMA_M

    @property
    def gives_registers(self) -> bool:
        """Four warps copy, and leave their registers to two warp groups that multiply."""
        return self.warp_groups == 2

    @property
    def threads(self) -> int:
        """The threads of a block, the copying warps included."""
        return 128 * self.warp_groups + (128 if self.gives_registers else 32)

    @property
    def gathered_steps(self) -> int:
        """The steps of K whose sum is added to the tile's at once; 1: each by itself."""
        return FEW_STEPS if self.keeps else GATHERED_STEPS if self.block_n <= GATHERING_N else 1

    @property
    def stage_bytes(self) -> int:
        """One step of K: float32 of the rows, three parts of the columns."""
        return 4 * BLOCK_K * self.block_m + PARTS * LINE_BYTES * self.block_n

    @property
    def sent_bytes(self) -> int:
        """Sums that a block is sent by the others of its tile."""
        return 4 * self.block_m * self.block_n // self.cluster_k * (self.cluster_k - 1)

    @property
    def kept_bytes(self) -> int:
        """Sums that a block gathers in shared memory."""
        return 4 * self.block_m * self.block_n * self.keeps

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block: stages, sums that it is sent or gathers, barriers."""
        sums_bytes = self.sent_bytes + self.kept_bytes
        return self.stages * self.stage_bytes + sums_bytes + BARRIER_BYTES * (2 * self.stages + self.warp_groups)

    def __str__(self) -> str:
        ways = (f"_h{self.halves}" if self.halves > 1 else "") + ("_keeps" if self.keeps else "")
        return f"{self.block_m}x{self.block_n}x{BLOCK_K}_s{self.stages}_k{self.cluster_k}{ways}"


def _shapes(block_m: int, block_n: int, stages: int, *cluster_k: int, halves: int = 1, keeps: bool = False) -> tuple[Shape, ...]:
    one = Shape(block_m=block_m, block_n=block_n, stages=stages, halves=halves, keeps=keeps)
    return tuple(dataclasses.replace(one, cluster_k=blocks) for blocks in cluster_k)


SHAPES: tuple[Shape, ...] = (
    *_shapes(128, 128, 5, 1, halves=2),
    *_shapes(128, 112, 5, 1, halves=2),
    *_shapes(128, 128, 5, 1),
    *_shapes(128, 128, 4, 1, halves=2, keeps=True),
    *_shapes(128, 128, 4, 2, 4, halves=2),
    *_shapes(128, 64, 7, 1),
    *_shapes(128, 64, 7, 1, halves=2),
    *_shapes(128, 64, 6, 2, 4, 8),
    *_shapes(64, 64, 9, 2, 8),
    *_shapes(128, 32, 8, 2, 4),
    *_shapes(128, 16, 10, 1, 2),
    *_shapes(64, 16, 16, 2),
)
"""The shapes, with as many stages as there is room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A shape, and what a launch is told.

    ``swap_ab``: outᵀ = bᵀ aᵀ, so that b's columns are the rows that are split in registers. ``blocks``: so many go on from one tile
    to the next, or 0 where each tile has a cluster of its own. ``pdl``: the first launch may begin before the one before it has
    ended.
    """

    shape: Shape
    swap_ab: bool = False
    blocks: int = 0
    pdl: bool = False

    def __str__(self) -> str:
        persistent = f"_b{self.blocks}" if self.blocks else ""
        return f"{self.shape}{persistent}{'_swap' if self.swap_ab else ''}{'_pdl' if self.pdl else ''}"


def is_packed(problem: Problem, config: Config) -> bool:
    """q is a prepacked b, split beforehand."""
    return problem.prepacked and not config.swap_ab


def copies_p(problem: Problem, config: Config) -> bool:
    """p is copied into rows that TMA can read."""
    return by_k(operands_of(problem, swap_ab=config.swap_ab)[0]) is None


def grid_of(problem: Problem, config: Config) -> tuple[int, int]:
    """Tiles below and beside each other, as many as it takes to cover the result."""
    rows, cols = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    return -(-rows // config.shape.block_m), -(-cols // config.shape.block_n)


def tiles_of(problem: Problem, config: Config) -> int:
    """The tiles of all products of a batch."""
    below, beside = grid_of(problem, config)
    return below * beside * problem.batch


def steps_of(problem: Problem) -> int:
    """The steps of K: an even number, with zeros at its end."""
    return 2 * -(-problem.k // (2 * BLOCK_K))


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem with which ``why_not`` found nothing wrong, or None."""
    shape, tiles = config.shape, tiles_of(problem, config)
    if (reason := device.why_no_smem(shape.shared_bytes)) is not None:
        return reason
    if shape.cluster_k > MOST_CLUSTER:
        return f"a cluster has {shape.cluster_k} blocks, at most {MOST_CLUSTER} can be relied on"
    if shape.block_n // 8 % shape.cluster_k:
        return f"{shape.block_n // 8} columns of eight cannot be shared out among {shape.cluster_k} blocks"
    if 2 * shape.cluster_k > steps_of(problem):
        return f"K has {steps_of(problem)} steps, too few for {shape.cluster_k} parts of two"
    if shape.cluster_k > 1 and config.blocks:
        return "the blocks of a cluster have one tile alone: they are sent its sums once"
    if shape.keeps and (shape.cluster_k > 1 or steps_of(problem) <= FEW_STEPS):
        return f"sums of {steps_of(problem)} steps by {shape.cluster_k} blocks are not gathered in shared memory"
    steps = -(-steps_of(problem) // shape.cluster_k)
    if shape.gathered_steps == 1 and (reason := why_not_one_by_one(problem, device, steps * BLOCK_K)) is not None:
        return reason
    if tiles * shape.cluster_k > MOST_TILES:
        return f"{tiles} tiles, at most {MOST_TILES // shape.cluster_k} fit a grid"
    if is_packed(problem, config) and copies_p(problem, config):
        return "b is packed, and a would have to be copied first: TMA copies rows or columns that are aligned to 16 bytes"
    return None
