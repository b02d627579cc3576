"""Configs of the bsr kernel: a compile-time ``Shape``, launch parameters, and the legality predicate."""

from dataclasses import dataclass

from ....device import DeviceInfo
from ....problem import Problem
from ..boxes import LINE, why_not_staged
from ..hopper import BARRIER_BYTES, registers_per_thread

UNIT = 32
"""Rows of the weight that one warp multiplies (a unit): two rows of blocks of 16, or one of blocks of 32."""
FRAGMENT, FRAGMENT_BYTES = 16, 512
"""Side and bytes of a fragment, which a warp multiplies at once. A block is one fragment or four."""
OTHER_REGISTERS = 56
"""Registers of a thread in addition to its sums. If fewer are available, the copying warps leave theirs to the multiplying ones."""
GIVEN_REGISTERS = 32
"""Registers of a copying thread that leaves the rest to the multiplying ones."""
MOST_TILES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tile of UNIT rows of the weight for each of ``warps`` by ``block_n`` tokens, with LINE elements of K in each of ``stages``.

    The ``cluster`` blocks have tiles of different rows and the same tokens, so each copies a part of x for all. A warp has its next
    ``queue`` weight fragments in flight.
    """

    warps: int
    block_n: int
    stages: int
    cluster: int = 1
    queue: int = 8

    @property
    def rows(self) -> int:
        return self.warps * UNIT

    @property
    def gives_registers(self) -> bool:
        """True if copying takes four warps, which leave most of their registers to the multiplying ones. One of the four copies."""
        return registers_per_thread(32 * (self.warps + 1), 1) < self.block_n + OTHER_REGISTERS

    @property
    def left_registers(self) -> int:
        """Registers of a multiplying thread that gets registers of the copying warps."""
        all_of_them = registers_per_thread(self.threads, 1) * self.threads
        return (all_of_them - 128 * GIVEN_REGISTERS) // (32 * self.warps) // 8 * 8

    @property
    def threads(self) -> int:
        return 32 * self.warps + (128 if self.gives_registers else 32)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: x and the barriers of all stages, and the warps' fragments."""
        return self.stages * (self.block_n * LINE * 2 + 2 * BARRIER_BYTES) + self.warps * self.queue * FRAGMENT_BYTES

    def __str__(self) -> str:
        return f"{self.rows}x{self.block_n}x{LINE}_s{self.stages}q{self.queue}{f'_n{self.cluster}' if self.cluster > 1 else ''}"


SHAPES: tuple[Shape, ...] = (
    Shape(warps=8, block_n=128, stages=12),
    Shape(warps=8, block_n=128, stages=12, cluster=2),
    Shape(warps=8, block_n=128, stages=12, cluster=4),
    Shape(warps=12, block_n=96, stages=14, cluster=2),
    Shape(warps=16, block_n=64, stages=20),
    Shape(warps=16, block_n=64, stages=20, cluster=2),
    Shape(warps=8, block_n=64, stages=20),
    Shape(warps=8, block_n=64, stages=20, cluster=2),
    Shape(warps=4, block_n=64, stages=20, cluster=2),
    Shape(warps=4, block_n=64, stages=20, cluster=4),
    Shape(warps=8, block_n=32, stages=32, cluster=2, queue=16),
    Shape(warps=4, block_n=32, stages=32, cluster=4, queue=16),
)
"""Shapes from many tokens to few. The deep ring lets warps with fewer blocks run ahead of warps with many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shape, at most ``blocks`` persistent blocks, and ``pdl``: the launch may begin before the previous one ends."""

    shape: Shape
    blocks: int = 132
    pdl: bool = False

    def __str__(self) -> str:
        return f"{self.shape}_b{self.blocks}{'_pdl' * self.pdl}"


def units_of(n: int) -> int:
    """Return the units in a weight of ``n`` rows."""
    return -(-n // UNIT)


def groups_of(problem: Problem, shape: Shape) -> int:
    """Return the clusters of tiles that cover all rows of the weight."""
    return -(-problem.n // (shape.rows * shape.cluster))


def tiles_of(problem: Problem, shape: Shape) -> int:
    """Return the clusters of tiles that cover the result."""
    return groups_of(problem, shape) * -(-problem.m // shape.block_n)


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    shape = config.shape
    if (reason := device.why_no_smem(shape.shared_bytes)) is not None:
        return reason
    if problem.epilogue is not None and shape.gives_registers and shape.left_registers < shape.block_n + OTHER_REGISTERS:
        return f"the epilogue needs {OTHER_REGISTERS} registers, but {shape.block_n} of {shape.left_registers} hold sums"
    if config.blocks < shape.cluster:
        return f"{config.blocks} blocks, expected at least a cluster of {shape.cluster}"
    if tiles_of(problem, shape) >= MOST_TILES:
        return f"{tiles_of(problem, shape)} tiles, at most {MOST_TILES} can be counted"
    return why_not_staged(problem.a, shape.block_n, LINE, shape.cluster)
