"""Configs of the float32-by-parts kernel: a compile-time ``Shape``, launch parameters, and the legality predicate."""

from dataclasses import dataclass
from typing import Any, Self

from ....device import DeviceInfo
from ....problem import Layout, Problem
from ...by_parts import FEW_TERMS, why_not_one_by_one
from ..boxes import batches, by_k, grid_of, operands_of
from ..hopper import BARRIER_BYTES, MOST_CLUSTER, TMA_BYTES, WGMMA_M

BLOCK_K = 32
"""Elements of K in a stage: a 128-byte line of float32, or a 64-byte line of each part."""
PARTS = 3
LINE_BYTES = 2 * BLOCK_K
PLANE_LINES = 8
"""Alignment of a plane's line count: the lines after which its swizzle pattern repeats."""
ALIGNED = TMA_BYTES // 4
"""Elements to which TMA aligns addresses and pitches."""
SMEM_GATHERED_STEPS = FEW_TERMS // BLOCK_K
"""Steps whose sum is gathered at once, if sums are gathered in shared memory."""
MOST_TILES = 2**28
GATHERED_STEPS, GATHERING_N = 16, 64
"""Steps of K whose sum is added to the tile's at once, and the widest tile with registers for it."""
PLANES_ALIGNED = 1024
SIDE = 64
"""Lines, and elements along K, of one block of the splitting kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tile of ``block_m`` by ``block_n`` sums, with ``stages`` of BLOCK_K. The ``cluster_k`` blocks of a cluster divide K.

    With two ``halves`` of the columns, one half multiplies while the sums of the other are added. ``keeps``: sums are gathered in
    shared memory, because wide tiles have no registers for it.
    """

    block_m: int
    block_n: int
    stages: int
    cluster_k: int
    halves: int = 1
    keeps: bool = False

    @property
    def warp_groups(self) -> int:
        return self.block_m // WGMMA_M

    @property
    def gives_registers(self) -> bool:
        """True if four warps copy, and leave most of their registers to the two multiplying warp groups."""
        return self.warp_groups == 2

    @property
    def threads(self) -> int:
        return 128 * self.warp_groups + (128 if self.gives_registers else 32)

    @property
    def gathered_steps(self) -> int:
        """Steps of K whose sum is added to the tile's at once. With 1, each step is added alone."""
        return SMEM_GATHERED_STEPS if self.keeps else GATHERED_STEPS if self.block_n <= GATHERING_N else 1

    @property
    def stage_bytes(self) -> int:
        """Bytes of one step of K: float32 for the rows, three parts for the columns."""
        return 4 * BLOCK_K * self.block_m + PARTS * LINE_BYTES * self.block_n

    @property
    def sent_bytes(self) -> int:
        """Bytes of sums that a block receives from the other blocks of its tile."""
        return 4 * self.block_m * self.block_n // self.cluster_k * (self.cluster_k - 1)

    @property
    def kept_bytes(self) -> int:
        """Bytes of sums that a block gathers in shared memory."""
        return 4 * self.block_m * self.block_n * self.keeps

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: stages, received or gathered sums, barriers."""
        sums_bytes = self.sent_bytes + self.kept_bytes
        return self.stages * self.stage_bytes + sums_bytes + BARRIER_BYTES * (2 * self.stages + self.warp_groups)

    def __str__(self) -> str:
        ways = (f"_h{self.halves}" if self.halves > 1 else "") + ("_keeps" if self.keeps else "")
        return f"{self.block_m}x{self.block_n}x{BLOCK_K}_s{self.stages}_k{self.cluster_k}{ways}"


def _shapes(block_m: int, block_n: int, stages: int, *cluster_k: int, halves: int = 1, keeps: bool = False) -> tuple[Shape, ...]:
    rest: dict[str, Any] = {"halves": halves, "keeps": keeps}
    return tuple(Shape(block_m=block_m, block_n=block_n, stages=stages, cluster_k=blocks, **rest) for blocks in cluster_k)


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
"""All shapes, each with the most stages that fit in shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shape plus launch parameters.

    ``swap_ab``: compute outᵀ = bᵀ aᵀ, so that columns of b are the rows that registers split. ``blocks`` persistent blocks walk
    over the tiles; with 0, each tile has a cluster of its own. ``pdl``: the first launch may begin before the previous one ends.
    """

    shape: Shape
    swap_ab: bool = False
    blocks: int = 0
    pdl: bool = False

    def __str__(self) -> str:
        persistent = f"_b{self.blocks}" if self.blocks else ""
        return f"{self.shape}{persistent}{'_swap' if self.swap_ab else ''}{'_pdl' if self.pdl else ''}"


def is_packed(problem: Problem, config: Config) -> bool:
    """Return True if q is a prepacked b, which is already split."""
    return problem.prepacked and not config.swap_ab


def copies_p(problem: Problem, config: Config) -> bool:
    """Return True if p must first be copied into rows that TMA can read."""
    return by_k(operands_of(problem, swap_ab=config.swap_ab)[0]) is None


def tiles_of(problem: Problem, config: Config) -> int:
    """Return the tiles of all products of the batch."""
    tiles_m, tiles_n = grid_of(problem, config)
    return tiles_m * tiles_n * problem.batch


def steps_of(problem: Problem) -> int:
    """Return the steps of K, rounded up to an even number with zeros."""
    return 2 * -(-problem.k // (2 * BLOCK_K))


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    shape, tiles = config.shape, tiles_of(problem, config)
    if (reason := device.why_no_smem(shape.shared_bytes)) is not None:
        return reason
    if shape.cluster_k > MOST_CLUSTER:
        return f"a cluster has {shape.cluster_k} blocks, at most {MOST_CLUSTER} can be relied on"
    if shape.block_n // 8 % shape.cluster_k:
        return f"{shape.block_n // 8} columns of eight cannot be divided evenly among {shape.cluster_k} blocks"
    if 2 * shape.cluster_k > steps_of(problem):
        return f"K has {steps_of(problem)} steps, too few for {shape.cluster_k} parts of two"
    if shape.cluster_k > 1 and config.blocks:
        return f"cluster_k is {shape.cluster_k} and blocks {config.blocks}: a persistent block needs cluster_k=1"
    if shape.keeps and (shape.cluster_k > 1 or steps_of(problem) <= SMEM_GATHERED_STEPS):
        return f"keeps needs over {SMEM_GATHERED_STEPS} steps and 1 block, got {steps_of(problem)} and {shape.cluster_k}"
    steps = -(-steps_of(problem) // shape.cluster_k)
    if shape.gathered_steps == 1 and (reason := why_not_one_by_one(problem, device, steps * BLOCK_K)) is not None:
        return reason
    if tiles * shape.cluster_k > MOST_TILES:
        return f"{tiles} tiles, at most {MOST_TILES // shape.cluster_k} fit a grid"
    if is_packed(problem, config) and copies_p(problem, config):
        return "b is packed, but a needs a copy first: TMA copies rows or columns that are aligned to 16 bytes"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Scratch memory of a call: a copy of p, then the planes of q. Parts that already exist take no space."""

    copies: bool
    planes_at: int
    size_bytes: int

    @classmethod
    def of(cls, problem: Problem, config: Config) -> Self:
        p, q, _ = operands_of(problem, swap_ab=config.swap_ab)
        copies = copies_p(problem, config)
        copied = batches(p) * p.size[-2] * pitch_of(problem.k) * 4 if copies else 0
        planes_at = -(-copied // PLANES_ALIGNED) * PLANES_ALIGNED
        size = 0 if is_packed(problem, config) else batches(q) * steps_of(problem) * PARTS * lines_of(q) * LINE_BYTES
        return cls(copies=copies, planes_at=planes_at, size_bytes=planes_at + size)


def lines_of(q: Layout) -> int:
    return -(-q.size[-2] // PLANE_LINES) * PLANE_LINES


def pitch_of(k: int) -> int:
    """Return the elements between two rows of a copied p."""
    return -(-k // ALIGNED) * ALIGNED
