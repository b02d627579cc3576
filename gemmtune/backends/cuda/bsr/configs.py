"""A config: what is compiled, a ``Shape`` of the kernel, and what a launch is told. One predicate says whether it is legal."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....device import DeviceInfo
from ....problem import Problem
from ..boxes import by_k
from ..hopper import BARRIER_BYTES, HALF_SMEM_BYTES, LINE_BYTES, MOST_BOX, MOST_CLUSTER, WGMMA_M, clusters_at_a_time

UNIT = 64
"""The rows of a weight that a warp group multiplies, and the elements along K of a step: a unit of the weight has both."""
UNIT_BYTES = UNIT * LINE_BYTES
TOLD_BYTES = 8
"""What the copying warp tells the others of each stage."""
MANY_SUMS = 64
"""The sums in each thread of two warp groups beyond which the copying warps leave these registers."""
REGISTERS = {2: (56, 224), 4: (56, 104)}
"""The registers of a thread that copies, and of those to which it leaves the others, by the warp groups that multiply. Together
they are no more than all threads have to begin with: who asks for more waits for ever."""
MOST_PROMOTED = 256
"""The most bytes that L2 asks of memory at a time."""
MOST_TILES = 2**28
MOST_MAPPED = 2**37
"""Elements of a weight whose units are half of the lines that a tensor map may have."""
MOST_JOINED = 4
"""Blocks that one unit joins at most along either side: beyond, nearly all of it is zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tile of ``block_m`` rows of the weight, 64 for each warp group, by ``block_n`` tokens, with ``stages`` of 64 along K.

    There is room for so many ``units`` of the weight at a time, of all stages together: warp groups have none in many of them.
    The ``cluster_k`` blocks of a cluster share a tile, each with its part of the steps; or ``cluster_n`` of them have tiles beside
    each other, and copy a part of the weight each for all. ``mapped``: units are copied as boxes of a tensor map, as x is, instead
    of as bytes.
    """

    block_m: int
    block_n: int
    stages: int
    units: int
    cluster_k: int = 1
    cluster_n: int = 1
    mapped: bool = False

    @property
    def cluster(self) -> int:
        """The blocks of a cluster."""
        return self.cluster_k * self.cluster_n

    @property
    def warp_groups(self) -> int:
        """The warp groups that multiply."""
        return self.block_m // WGMMA_M

    @property
    def gives_registers(self) -> bool:
        """Four warps copy, and leave their registers to those that multiply."""
        return self.warp_groups > 2 or (self.warp_groups == 2 and self.block_n // 2 > MANY_SUMS)

    @property
    def registers(self) -> tuple[int, int]:
        """Those of a thread that copies, and of one that multiplies, where the one leaves them to the other."""
        return REGISTERS[self.warp_groups] if self.gives_registers else (0, 0)

    @property
    def threads(self) -> int:
        """The threads of a block, the copying warps included."""
        return 128 * self.warp_groups + (128 if self.gives_registers else 32)

    @property
    def ring_bytes(self) -> int:
        """The units, and x of all stages, for all tokens of the tile."""
        return self.units * UNIT_BYTES + self.stages * self.block_n * LINE_BYTES

    @property
    def sent_bytes(self) -> int:
        """Sums that a block is sent by the others of its tile."""
        return 4 * self.block_m * self.block_n // self.cluster_k * (self.cluster_k - 1)

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block: stages and units, the sums that it is sent, what is told of stages, and barriers."""
        barriers = 2 * self.stages + self.warp_groups
        return self.ring_bytes + self.stages * TOLD_BYTES + self.sent_bytes + BARRIER_BYTES * barriers

    @property
    def blocks_per_sm(self) -> int:
        """Blocks on a multiprocessor: with two, one multiplies while the other stores."""
        return 2 if self.shared_bytes <= HALF_SMEM_BYTES and not self.gives_registers else 1

    def __str__(self) -> str:
        cluster = f"_k{self.cluster_k}" * (self.cluster_k > 1) + f"_n{self.cluster_n}" * (self.cluster_n > 1)
        return f"{self.block_m}x{self.block_n}x{UNIT}_s{self.stages}u{self.units}{'t' * self.mapped}{cluster}"


def _shapes(block_m: int, block_n: int, stages: int, units: int, *cluster_k: int, cluster_n: int = 1) -> tuple[Shape, ...]:
    shape = Shape(block_m=block_m, block_n=block_n, stages=stages, units=units, cluster_n=cluster_n)
    return tuple(replace(shape, cluster_k=n) for n in cluster_k or (1,))


SHAPES: tuple[Shape, ...] = (
    *_shapes(128, 256, 5, 8),
    replace(*_shapes(128, 256, 5, 8), mapped=True),
    *_shapes(128, 256, 5, 8, cluster_n=2),
    *_shapes(256, 128, 7, 14),
    replace(*_shapes(256, 128, 7, 14), mapped=True),
    *_shapes(256, 128, 7, 14, cluster_n=2),
    *_shapes(128, 128, 8, 12),
    *_shapes(128, 128, 8, 12, cluster_n=2),
    *_shapes(128, 128, 6, 10, 2),
    *_shapes(64, 128, 9, 9),
    *_shapes(128, 64, 6, 8),
    *_shapes(128, 64, 4, 8, 2),
    *_shapes(64, 128, 4, 4, 1, 2),
    *_shapes(64, 64, 6, 6, 1, 2, 4),
    *_shapes(64, 32, 8, 8, 1, 2, 4),
    *_shapes(64, 16, 10, 10, 1, 2),
)
"""The shapes from many tokens to few: as large as registers and memory allow, then two blocks on a multiprocessor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A shape, and what a launch is told.

    ``blocks``: so many go on from one tile to the next, or 0 where each block has one tile; those of ``strip`` clusters of tokens
    are worked off from the longest rows of the weight to the shortest. ``promotion``: the bytes of x that L2 asks of memory at a
    time, of which a step has 128. ``pdl``: the launch may begin before the one before it has ended.
    """

    shape: Shape
    blocks: int = 0
    strip: int = 8
    promotion: int = 128
    pdl: bool = False

    def __str__(self) -> str:
        order = f"{f'_b{self.blocks}' if self.blocks else ''}_g{self.strip}"
        return f"{self.shape}{order}{'_l256' * (self.promotion == MOST_PROMOTED)}{'_pdl' * self.pdl}"


def groups_of(problem: Problem, shape: Shape) -> int:
    """The tiles below each other."""
    return -(-problem.n // shape.block_m)


def tiles_n_of(problem: Problem, shape: Shape) -> int:
    """Clusters' tiles beside each other, of a cluster all."""
    return -(-problem.m // (shape.block_n * shape.cluster_n))


def tiles_of(problem: Problem, shape: Shape) -> int:
    """The tiles that cover the result, those of a cluster counted once."""
    return groups_of(problem, shape) * tiles_n_of(problem, shape)


def room_of(device: DeviceInfo, shape: Shape) -> int:
    """The blocks that run at a time."""
    return clusters_at_a_time(device.sm_count, shape.cluster) * shape.cluster * shape.blocks_per_sm


def joins(problem: Problem) -> bool:
    """Units join blocks, or are larger than them: they may hold zeros where the weight has no block."""
    sparsity = problem.sparsity
    assert sparsity is not None
    return bool(sparsity.block_n % UNIT or sparsity.block_k % UNIT)


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem with which ``why_not`` found nothing wrong, or None."""
    shape, tiles = config.shape, tiles_of(problem, config.shape)
    if shape.shared_bytes > device.smem_per_block_bytes:
        return f"takes {shape.shared_bytes} bytes of shared memory, a block has {device.smem_per_block_bytes}"
    if shape.units < shape.warp_groups:
        return f"room for {shape.units} units, a step has up to {shape.warp_groups}"
    if shape.cluster > MOST_CLUSTER:
        return f"a cluster has {shape.cluster} blocks, at most {MOST_CLUSTER} can be relied on"
    if shape.block_n > MOST_BOX:
        return f"a tile has {shape.block_n} tokens, at most {MOST_BOX} are copied at once"
    if shape.block_n // 8 % shape.cluster_k:
        return f"{shape.block_n // 8} times eight tokens cannot be shared out among {shape.cluster_k} blocks"
    if not by_k(problem.a) and shape.block_n % UNIT:
        return f"an x whose tokens are contiguous is copied in lines of {UNIT}, and a tile has {shape.block_n}"
    if shape.cluster_k > 1 and config.blocks:
        return "the blocks of a cluster have one tile alone: they are sent its sums once"
    if problem.m <= shape.block_n * (shape.cluster_n - 1):
        return f"a cluster has {shape.cluster_n} tiles of {shape.block_n} tokens, x has {problem.m} tokens"
    if config.promotion not in (LINE_BYTES, MOST_PROMOTED):
        return f"L2 asks for {config.promotion} bytes at a time, expected {LINE_BYTES} or {MOST_PROMOTED}"
    if config.strip < 1:
        return f"strips of {config.strip}, expected at least one cluster of tokens"
    if config.blocks % shape.cluster:
        return f"{config.blocks} blocks are no whole clusters of {shape.cluster}"
    if shape.mapped and shape.cluster_n > 1:
        return "what is copied for all tiles of a cluster is copied as bytes"
    if shape.mapped and problem.n * problem.k >= MOST_MAPPED:
        return f"a weight of {problem.n} times {problem.k}: a tensor map has less than 2**32 lines, of {UNIT} elements"
    if tiles * shape.cluster > MOST_TILES:
        return f"{tiles} tiles, at most {MOST_TILES // shape.cluster} fit a grid"
    return None
