"""Configs of the grouped kernel: a compile-time ``Shape``, launch parameters, and the legality predicate."""

from dataclasses import dataclass

from ....device import DeviceInfo
from ....problem import Problem
from ..boxes import LINE, by_k, operands_of, why_not_staged, why_not_staged_tiles
from ..groups import most_below, why_not_counted
from ..hopper import BARRIER_BYTES

BLOCK_K = 64
"""Elements of K in a stage: one swizzled line of a K-contiguous operand."""
THREADS = 256
"""Threads that multiply, in two warp groups."""
STORED_BYTES = 2048
"""Staging buffer in which a warp reorders results before it stores them: 64 by 16 elements of 16 bits."""
PLACE_BYTES = 16
"""Size of the tile description that each stage carries."""
MOST_SUMS_WITHOUT = 64
"""Most sums per thread for which it needs no registers of the copying warps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tile of ``block_m`` by ``block_n`` sums, with BLOCK_K elements of K in each of ``stages``.

    A cluster has ``cluster_m`` by ``cluster_n`` tiles, along M and N. It copies operands that its tiles share once (multicast).

    ``fitted``: columns of b are the tile's rows, and each group divides its rows anew into tiles of at most ``block_n``. Tiles of a
    group are equally high, a multiple of ``fitted`` rows, and the last one ends less than ``fitted`` rows past the group. With 0
    each tile has ``block_n`` rows.
    """

    block_n: int
    stages: int
    cluster_m: int = 1
    cluster_n: int = 1
    fitted: int = 0
    block_m: int = 128

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def gives_registers(self) -> bool:
        """True if copying takes four warps, which leave most of their registers to the multiplying ones. One of the four copies."""
        return self.block_m * self.block_n // THREADS > MOST_SUMS_WITHOUT

    @property
    def threads(self) -> int:
        return THREADS + (128 if self.gives_registers else 32)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: stages with their barriers and tile descriptions, and the staging buffers of results."""
        stage_bytes = (self.block_m + self.block_n) * BLOCK_K * 2 + PLACE_BYTES + 2 * BARRIER_BYTES
        return self.stages * stage_bytes + THREADS // 32 * STORED_BYTES

    @property
    def products_n(self) -> tuple[int, ...]:
        """Lines of q per instruction: one size for full tiles, or each size that a fitted tile can have."""
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
"""Shapes with fitted tiles, which spare groups of just over 256 rows a second full tile. Two tiles side by side share rows."""
SHAPES: tuple[Shape, ...] = (
    *(
        Shape(block_n=block_n, stages=stages, cluster_m=cluster_m, cluster_n=cluster_n)
        for block_n, stages in ((256, 4), (192, 5), (128, 6))
        for cluster_m, cluster_n in ((1, 1), (2, 1), (1, 2))
    ),
    Shape(block_n=64, stages=8),
    Shape(block_n=32, stages=10),
    Shape(block_n=16, stages=11),
    *FITTED,
)
"""All shapes, each with the most stages that fit in shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shape plus launch parameters.

    ``swap_ab``: columns of b are the tile's rows, so that a group with few rows still fills the tile. At most ``blocks`` persistent
    blocks walk over the tiles. They process ``strip`` rows of clusters column by column. ``pdl``: the launch may begin before the
    previous one ends.
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


def clusters_along_n(problem: Problem, config: Config) -> int:
    """Return the clusters of tiles that cover the result's columns."""
    return -(-problem.n // (config.tile[1] * config.shape.cluster_n))


def most_clusters(problem: Problem, config: Config) -> int:
    """Return the maximum number of clusters in all groups, for rising offsets."""
    rows = config.tile[0] * config.shape.cluster_m
    if problem.divides_terms:
        return problem.groups * -(-problem.m // rows) * clusters_along_n(problem, config)
    return most_below(problem, rows) * clusters_along_n(problem, config)


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    shape, (rows, _) = config.shape, config.tile
    if (reason := device.why_no_smem(shape.shared_bytes)) is not None:
        return reason
    if config.swap_ab and (shape.cluster > (shape.cluster_n if shape.fitted else 1) or problem.divides_terms):
        return "swap_ab needs groups of rows, and in a cluster fitted tiles side by side (cluster_n)"
    if shape.fitted and (not config.swap_ab or shape.block_n % shape.fitted):
        return f"fitted tiles need swap_ab and block_n as a multiple of {shape.fitted}"
    if shape.block_m % 128 or (shape.block_m > 128 and not shape.fitted):
        return f"block_m is {shape.block_m}, expected 128, or a multiple of it with fitted tiles"
    if config.blocks < shape.cluster or config.strip < 1:
        return f"{config.blocks} blocks in strips of {config.strip}, expected at least a cluster of {shape.cluster} and one"
    if not config.swap_ab and shape.block_n < LINE:
        return f"a tile of {rows}x{shape.block_n}: results are stored in lines of {LINE}"
    if (reason := why_not_counted(problem, rows, clusters_along_n(problem, config))) is not None:
        return reason
    if not shape.fitted:
        return why_not_staged_tiles(problem, config, BLOCK_K)
    p, q, _ = operands_of(problem, swap_ab=config.swap_ab)
    return why_not_staged(p, shape.block_m, BLOCK_K, 1) or why_not_staged(q, shape.fitted, BLOCK_K, 1)


def why_not_groups(problem: Problem) -> str | None:
    """Return the reason why groups cannot start at any index of the dimension that they divide, or None.

    TMA starts at any line, but within a line only at multiples of 16 bytes; elsewhere an H200 reports an illegal instruction.
    """
    p, q, _ = operands_of(problem, swap_ab=False)
    if problem.divides_terms and (by_k(p) or by_k(q)):
        return "an operand is contiguous along K, where TMA starts at multiples of 16 bytes, but a group starts at any term"
    if not problem.divides_terms and not by_k(p):
        return "a is contiguous along M, where TMA starts at multiples of 16 bytes, but a group starts at any row"
    return None
