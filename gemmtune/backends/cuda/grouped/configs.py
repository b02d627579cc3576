"""A config: what is compiled, a ``Shape`` of the kernel, and what a launch is told. One predicate says whether it is legal."""

from __future__ import annotations

from dataclasses import dataclass

from ....device import DeviceInfo
from ....problem import Problem
from ..boxes import LINE, by_k, operands_of, why_not_staged
from ..groups import most_below, why_not_counted
from ..hopper import BARRIER_BYTES

BLOCK_K = 64
"""A stage has a swizzled line of each row along K, or of each step along rows."""
THREADS = 256
"""Those that multiply, in two warp groups."""
STORED_BYTES = 2048
"""Results that a warp puts in rows before they are stored: 64 by 16 of 16 bits."""
PLACE_BYTES = 16
"""What a stage says of the tile that begins in it."""
MOST_SUMS_WITHOUT = 64
"""A thread with so many sums needs no registers of threads that copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tile of ``block_m`` by ``block_n`` sums, with BLOCK_K elements of K in each of ``stages``.

    A cluster has ``cluster_m`` by ``cluster_n`` tiles below and beside each other, and copies once what both of them multiply.
    ``fitted``: columns of b are the rows of a tile, and the ``block_n`` rows of the result that it may have are divided anew for
    each group. Its tiles are equally high, ``fitted`` rows or a multiple, and the last one ends where the group does, but for less
    than that. With 0 each tile has ``block_n``.
    """

    block_n: int
    stages: int
    cluster_m: int = 1
    cluster_n: int = 1
    fitted: int = 0
    block_m: int = 128

    @property
    def cluster(self) -> int:
        """The blocks of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def gives_registers(self) -> bool:
        """Four warps are there to copy, of which one does, and leave their registers to those that multiply."""
        return self.block_m * self.block_n // THREADS > MOST_SUMS_WITHOUT

    @property
    def threads(self) -> int:
        """The threads of a block, the copying warps included."""
        return THREADS + (128 if self.gives_registers else 32)

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block: stages with their barriers and tiles, and results on their way to memory."""
        stage_bytes = (self.block_m + self.block_n) * BLOCK_K * 2 + PLACE_BYTES + 2 * BARRIER_BYTES
        return self.stages * stage_bytes + THREADS // 32 * STORED_BYTES

    @property
    def products_n(self) -> tuple[int, ...]:
        """The lines of q with which 64 of p are multiplied: those of a tile, or of each that may be fitted to a group."""
        return tuple(range(self.fitted, self.block_n + 1, self.fitted)) if self.fitted else (self.block_n,)

    def __str__(self) -> str:
        tiles = f"_{self.cluster_m}x{self.cluster_n}" if self.cluster > 1 else ""
        return f"{self.block_m}x{self.block_n}x{BLOCK_K}_s{self.stages}{tiles}{f'_fit{self.fitted}' if self.fitted else ''}"


FITTED = (
    Shape(block_n=256, stages=4, cluster_n=2, fitted=32),
    Shape(block_n=192, stages=5, cluster_n=2, fitted=32),
    Shape(block_n=128, stages=6, cluster_n=2, fitted=32),
    Shape(block_n=128, stages=6, fitted=32),
    Shape(block_m=256, block_n=160, stages=4, cluster_n=2, fitted=16),
)
"""Shapes whose tiles are fitted to groups: of 256 rows a group, half of the groups have a few more, for which other tiles are as
high as the first. Tiles of twice as many columns of b read rows of a half as often."""
SHAPES: tuple[Shape, ...] = (
    Shape(block_n=256, stages=4),
    Shape(block_n=256, stages=4, cluster_m=2),
    Shape(block_n=256, stages=4, cluster_n=2),
    Shape(block_n=192, stages=5),
    Shape(block_n=192, stages=5, cluster_m=2),
    Shape(block_n=192, stages=5, cluster_n=2),
    Shape(block_n=128, stages=6),
    Shape(block_n=128, stages=6, cluster_m=2),
    Shape(block_n=128, stages=6, cluster_n=2),
    Shape(block_n=64, stages=8),
    Shape(block_n=32, stages=10),
    Shape(block_n=16, stages=11),
    *FITTED,
)
"""As many stages as there is room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A shape, and what a launch is told.

    ``swap_ab``: columns of b are the rows of a tile, so that few rows of a group fill it. ``blocks`` at most go from tile to tile;
    those of ``strip`` clusters of rows are worked off column by column. ``pdl``: the launch may begin before the one before it has
    ended.
    """

    shape: Shape
    swap_ab: bool = False
    blocks: int = 132
    strip: int = 8
    pdl: bool = False

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the result in a tile."""
        tile = self.shape.block_m, self.shape.block_n
        return tile[::-1] if self.swap_ab else tile

    def __str__(self) -> str:
        order = f"_b{self.blocks}_g{self.strip}"
        return f"{self.shape}{'_swap' if self.swap_ab else ''}{order}{'_pdl' if self.pdl else ''}"


def clusters_beside(problem: Problem, config: Config) -> int:
    """The clusters of tiles that cover the columns of the result."""
    return -(-problem.n // (config.tile[1] * config.shape.cluster_n))


def most_clusters(problem: Problem, config: Config) -> int:
    """The clusters of tiles of all groups at most, where offsets rise."""
    rows = config.tile[0] * config.shape.cluster_m
    if problem.divides_terms:
        return problem.groups * -(-problem.m // rows) * clusters_beside(problem, config)
    return most_below(problem, rows) * clusters_beside(problem, config)


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem with which ``why_not`` found nothing wrong, or None."""
    shape, (rows, _) = config.shape, config.tile
    if (reason := device.why_no_smem(shape.shared_bytes)) is not None:
        return reason
    if config.swap_ab and (shape.cluster > (shape.cluster_n if shape.fitted else 1) or problem.divides_terms):
        return "b is the left operand for groups of rows alone, and in clusters where tiles beside each other are fitted"
    if shape.fitted and (not config.swap_ab or shape.block_n % shape.fitted):
        return f"fitted tiles have columns of b as their rows, and a multiple of {shape.fitted} rows of the result"
    if shape.block_m % 128 or (shape.block_m > 128 and not shape.fitted):
        return f"block_m is {shape.block_m}: two warp groups multiply 64 each, and several times that in fitted tiles alone"
    if config.blocks < shape.cluster or config.strip < 1:
        return f"{config.blocks} blocks in strips of {config.strip}, expected at least a cluster of {shape.cluster} and one"
    if not config.swap_ab and shape.block_n < LINE:
        return f"a tile of {rows}x{shape.block_n}: results are stored in lines of {LINE}"
    if (reason := why_not_counted(problem, rows, clusters_beside(problem, config))) is not None:
        return reason
    p, q, _ = operands_of(problem, swap_ab=config.swap_ab)
    if shape.fitted:
        return why_not_staged(p, shape.block_m, BLOCK_K, 1) or why_not_staged(q, shape.fitted, BLOCK_K, 1)
    return why_not_staged(p, shape.block_m, BLOCK_K, shape.cluster_n) or why_not_staged(q, shape.block_n, BLOCK_K, shape.cluster_m)


def why_not_groups(problem: Problem) -> str | None:
    """Why groups cannot begin anywhere along the dimension that they divide, or None.

    TMA begins at any line, but within a line at multiples of 16 bytes: a kernel that began elsewhere was ended by an H200 with an
    illegal instruction.
    """
    p, q, _ = operands_of(problem, swap_ab=False)
    if problem.divides_terms and (by_k(p) or by_k(q)):
        return "terms are contiguous in an operand, where TMA begins at multiples of 16 bytes, and a group at any term"
    if not problem.divides_terms and not by_k(p):
        return "rows are contiguous in a, where TMA begins at multiples of 16 bytes, and a group at any row"
    return None
