"""Configs of the persistent kernel: a compile-time ``Shape``, launch parameters, the division of tiles, and the legality predicate."""

from __future__ import annotations

from dataclasses import dataclass

from ....device import DeviceInfo
from ....problem import Problem
from ..boxes import by_k, operands_of, why_not_staged
from ..family import INT32_LIMIT
from ..hopper import (
    BARRIER_BYTES,
    GIVEN_REGISTERS,
    HALF_SMEM_BYTES,
    LEFT_REGISTERS,
    SMEM_BYTES,
    SWIZZLED_LINES,
    WGMMA_M,
    registers_per_thread,
)

BLOCK_K = 64
"""Elements of K in a stage: one swizzled line of an operand whose K is contiguous."""
REGISTERS = {2: (GIVEN_REGISTERS, LEFT_REGISTERS), 3: (32, 160)}
"""Registers of a copying and of a multiplying thread, by the warp groups that multiply."""
MOST_SUMS_WITHOUT = 64
"""Most sums per thread for which it needs no registers of the copying warps."""
BASE_REGISTERS = 38
"""Registers of a multiplying thread in addition to its sums."""
PART_BYTES, MOST_PARTS = 256, 8
"""Space in which a warp reorders 16 columns of q of its results, and the most such columns at once. Parts are 2, 4 or 8 quads."""
MOST_BLOCKS = 256
"""Maximum persistent blocks. More than multiprocessors would only wait."""
LEAST_STEPS = 4
"""Fewest steps of a part of a tile. With fewer, exchanging sums takes longer than it saves."""
MANY_SUMS = 160
"""Sums per thread above which only 4 quads of others' sums are loaded at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tile of ``block_m`` lines of p by ``block_n`` lines of q. p is a and q the transpose of b, or the other way with ``swap_ab``.

    A cluster has ``cluster_m`` by ``cluster_n`` tiles, and copies operands that its tiles share once (multicast). With two
    ``blocks_per_sm`` a launch can start while the previous one ends. There are as many stages as fit.
    """

    block_m: int
    block_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    blocks_per_sm: int = 1

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def warp_groups(self) -> int:
        """Warp groups that multiply."""
        return 3 if self.block_m % (2 * WGMMA_M) else 2

    @property
    def multiplying(self) -> int:
        """Threads that multiply."""
        return 128 * self.warp_groups

    @property
    def gives_registers(self) -> bool:
        """True if copying takes four warps, which leave most of their registers to the multiplying ones. One of the four copies."""
        return self.sums > MOST_SUMS_WITHOUT

    @property
    def threads(self) -> int:
        """Threads of one block, the copying warps included."""
        return self.multiplying + (128 if self.gives_registers else 32)

    @property
    def most_sums(self) -> int:
        """Maximum accumulators of a multiplying thread."""
        left = REGISTERS[self.warp_groups][1] if self.gives_registers else registers_per_thread(self.threads, self.blocks_per_sm)
        return left - BASE_REGISTERS

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return self.block_m * self.block_n // self.multiplying

    @property
    def stored_bytes(self) -> int:
        """Space in which a warp reorders results: a power of two of quads that divides those of a tile."""
        quads = self.block_n // 8
        return PART_BYTES * min(quads & -quads, MOST_PARTS // self.blocks_per_sm)

    @property
    def loads(self) -> int:
        """Quads of others' sums that a thread loads at once: a divisor of its own quads."""
        most = 4 if self.sums > MANY_SUMS or self.blocks_per_sm > 1 else 16
        return max(n for n in range(1, most + 1) if self.sums // 4 % n == 0)

    @property
    def stages(self) -> int:
        most = HALF_SMEM_BYTES if self.blocks_per_sm > 1 else SMEM_BYTES
        room = most - self.multiplying // 32 * self.stored_bytes
        return room // (2 * BLOCK_K * (self.block_m + self.block_n) + 2 * BARRIER_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: stages with their barriers, and the staging buffers of results."""
        stage_bytes = 2 * BLOCK_K * (self.block_m + self.block_n) + 2 * BARRIER_BYTES
        return self.stages * stage_bytes + self.multiplying // 32 * self.stored_bytes

    @property
    def sums_bytes(self) -> int:
        """Size of a tile's sums."""
        return 4 * self.block_m * self.block_n

    def __str__(self) -> str:
        tiles = f"_{self.cluster_m}x{self.cluster_n}" if self.cluster > 1 else ""
        more = f"_r{self.blocks_per_sm}" if self.blocks_per_sm > 1 else ""
        return f"{self.block_m}x{self.block_n}x{BLOCK_K}_s{self.stages}{tiles}{more}"


SHAPES: tuple[Shape, ...] = tuple(
    Shape(block_m=block_m, block_n=block_n, cluster_m=cluster_m, cluster_n=cluster_n, blocks_per_sm=blocks)
    for block_m, most in ((128, 256), (192, 176), (256, 160))
    for block_n in range(32, most + 1, 16)
    for cluster_m, cluster_n in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))
    for blocks in ((1, 2) if block_m == 128 and block_n <= 128 else (1,))
)
"""All shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shape plus launch parameters.

    At most ``blocks`` persistent blocks walk over the tiles. Tiles that do not fill all blocks are divided along K: evenly among
    ``all`` blocks, so that some have parts of two tiles, or in ``even`` parts, so that some blocks have none. With ``whole`` no tile
    is divided. ``swap_ab``: compute outᵀ = bᵀ aᵀ, so that columns of b are the tile's rows. ``pdl``: the launch may begin
    before the previous one ends, and prefetches its first ``prefetch_stages`` of b into L2.
    """

    shape: Shape
    blocks: int = 132
    swap_ab: bool = False
    division: str = "all"
    pdl: bool = False
    prefetch_stages: int = 0

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the result in the tiles of a cluster."""
        tile = self.shape.block_m * self.shape.cluster_m, self.shape.block_n * self.shape.cluster_n
        return tile[::-1] if self.swap_ab else tile

    def __str__(self) -> str:
        overlap = f"_pdl{self.prefetch_stages or ''}" if self.pdl else ""
        return f"{self.shape}{'_swap' if self.swap_ab else ''}_b{self.blocks}_{self.division}{overlap}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Division of clusters' tiles with ``steps`` of K each.

    The first ``sharers`` of ``clusters`` share ``shared`` tiles. Every cluster has ``waves`` whole ones.
    """

    steps: int
    clusters: int
    waves: int
    shared: int
    sharers: int

    @classmethod
    def of(cls, problem: Problem, config: Config) -> Division:
        """Return the division of a launch."""
        rows, cols = tiles_of(problem, config)
        steps, clusters = -(-problem.k // BLOCK_K), config.blocks // config.shape.cluster
        waves, left = divmod(rows * cols, clusters)
        parts = min(clusters // left, max(1, steps // LEAST_STEPS)) if left else 1
        if config.division == "whole" or (config.division == "even" and parts == 1) or not left:
            return cls(steps=steps, clusters=min(clusters, rows * cols), waves=waves + (left > 0), shared=0, sharers=1)
        sharers = parts * left if config.division == "even" else max(1, min(clusters, left * steps // LEAST_STEPS))
        return cls(steps=steps, clusters=clusters if waves else sharers, waves=waves, shared=left, sharers=sharers)

    def begin(self, cluster: int, lead: int) -> int:
        """Return the first step of a cluster's range, as the kernel does."""
        number, step = divmod(min(cluster, self.sharers) * self.shared * (self.steps + lead) // self.sharers, self.steps + lead)
        near = 0 if step < LEAST_STEPS else self.steps if step > self.steps - LEAST_STEPS else step
        return number * self.steps + near

    def parts(self, lead: int) -> int:
        """Return the maximum parts of a tile."""
        begins = {self.begin(cluster, lead) for cluster in range(self.clusters)} | {i * self.steps for i in range(self.shared)}
        counts = [0] * (self.shared or 1)
        for begin in begins:
            counts[min(begin // self.steps, len(counts) - 1)] += begin < self.shared * self.steps
        return max(1, *counts)


def tiles_of(problem: Problem, config: Config) -> tuple[int, int]:
    """Return the clusters of tiles that cover the result's rows and columns."""
    rows, cols = config.tile
    return -(-problem.m // rows), -(-problem.n // cols)


def lines_of(problem: Problem, config: Config) -> int:
    """Return the rows of a that a tile copies: an equal share of all, so that few are outside, which TMA copies slowly."""
    shape = config.shape
    most, tiles, among = (
        (shape.block_n, shape.cluster_n, shape.cluster_m) if config.swap_ab else (shape.block_m, shape.cluster_m, shape.cluster_n)
    )
    if not by_k(problem.a):
        return most
    share = -(-problem.m // (tiles_of(problem, config)[0] * tiles))
    return min(most, -(-share // (SWIZZLED_LINES * among)) * SWIZZLED_LINES * among)


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Return the reason why ``config`` is illegal for a problem that ``why_not`` accepts, or None."""
    shape = config.shape
    if (reason := device.why_no_smem(shape.shared_bytes)) is not None:
        return reason
    if shape.stages < 2 or shape.block_n % 16 or shape.block_m % (WGMMA_M * shape.warp_groups):
        return f"got {shape}, expected at least two stages, whole warp groups of 64 lines, and q in multiples of 16"
    if shape.sums > shape.most_sums or (shape.gives_registers and shape.blocks_per_sm > 1):
        return f"{shape.sums} sums for each thread of {shape.blocks_per_sm} blocks, at most {shape.most_sums} fit its registers"
    if not shape.cluster <= config.blocks <= MOST_BLOCKS:
        return f"{config.blocks} blocks, expected {shape.cluster} to {MOST_BLOCKS}"
    rows, cols = tiles_of(problem, config)
    steps = -(-problem.k // BLOCK_K)
    if rows * cols + config.blocks >= INT32_LIMIT or 2 * config.blocks**2 * steps >= INT32_LIMIT:
        return f"{rows * cols} tiles of {steps} steps cannot be counted in 32 bits"
    p, q, _ = operands_of(problem, swap_ab=config.swap_ab)
    return why_not_staged(p, shape.block_m, BLOCK_K, shape.cluster_n) or why_not_staged(q, shape.block_n, BLOCK_K, shape.cluster_m)
