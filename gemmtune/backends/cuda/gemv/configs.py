"""Shapes of the kernels for one to four rows: which are legal, and the model that ranks them.

The model's constants are rates of an H200; for other GPUs they are as good for an order.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....device import DeviceInfo
from ....problem import Problem
from ..hopper import MOST_GRID, registers_per_thread
from ..mixed.weights import Weights, weights_of

BLOCK_M = 4
"""The rows of a that there is room for: half of the columns of a product of a warp."""
TILE_N = 8
"""The columns of b in a product of a warp: half of its rows."""
MOST_WORDS = 4
"""Words of 32 bits that a thread loads at once."""
A_WORDS = 16
"""Words of a's row that a thread has in registers at most, a stage of weights of four bits."""
BASE_REGISTERS, TILE_REGISTERS = 14, 8
"""What a thread needs beside weights, rows and sums on their way: numbers, and addresses; and for each tile."""
MOST_RESIDENT_WARPS = 32
"""Warps of a multiprocessor that are planned with: more of them leave too few registers for loads on their way."""
LAUNCH_US = 2.0
STEP_US = 0.1
"""What each line costs that a warp reads after its first ones: its rows of a come from L1 just before."""
DRAM_GBPS = 4300.0
HALF_RATE_BYTES = 2 * 2**20
"""The bytes with which, on their way to all multiprocessors, half of the rate is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A block of ``warps`` that divide K, for ``block_n`` columns of b.

    ``stages``: lines of each column that a warp has on their way.
    """

    block_n: int
    stages: int
    warps: int

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return 32 * self.warps

    @property
    def col_tiles(self) -> int:
        """The products that a warp has beside each other."""
        return self.block_n // TILE_N

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block, which has sums alone: those of each half of a line, of each warp."""
        return 2 * self.warps * self.block_n * BLOCK_M * 4

    def a_stages(self, weights: Weights) -> int:
        """The stages whose rows of a are on their way, or in registers."""
        return min(self.stages, A_WORDS * weights.bits // (16 * words_of(weights)))

    def registers(self, weights: Weights) -> int:
        """About what a thread needs."""
        words = words_of(weights)
        grouped = {name for name, factor in weights.factors.items() if factor.group}
        factors = self.stages * self.col_tiles * (("scale" in grouped) + 2 * ("zero" in grouped))
        loaded = self.stages * self.col_tiles * 2 * words + self.a_stages(weights) * words * 16 // weights.bits
        sums = (6 if "scale" in grouped else 4) + (4 if weights.zero else 0)
        return BASE_REGISTERS + loaded + factors + self.col_tiles * (TILE_REGISTERS + sums)

    def blocks_per_sm(self, weights: Weights) -> int:
        """The blocks that a multiprocessor has room for, as many as are planned with."""
        most = max(MOST_RESIDENT_WARPS // self.warps, 1)
        return next((n for n in range(most, 1, -1) if self.registers(weights) <= registers_per_thread(self.threads, n)), 1)

    def block_k(self, weights: Weights) -> int:
        """The elements of K that a block reads at a time."""
        return self.warps * line_bytes(weights) * 8 // weights.bits

    def label(self, weights: Weights) -> str:
        """A name such as ``i4_4x8x2048_s4_w8``: rows, columns, elements of K that are read at a time, stages, warps."""
        kind = f"i{weights.bits}_" if weights.bits < 16 else ""
        return f"{kind}{BLOCK_M}x{self.block_n}x{self.block_k(weights)}_s{self.stages}_w{self.warps}"


SHAPES: tuple[Shape, ...] = tuple(
    Shape(block_n=block_n, stages=stages, warps=warps)
    for block_n, stages, warps in ((8, 4, 8), (8, 4, 4), (8, 2, 8), (8, 2, 16), (8, 8, 4), (16, 2, 8), (16, 4, 4), (16, 4, 8))
)
"""One column tile or two; more in registers, or more warps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A shape, and what a launch is told.

    ``pdl``: the launch may begin before the one before it has ended; ``prefetch_stages`` are then asked into L2 meanwhile.
    """

    shape: Shape
    pdl: bool = False
    prefetch_stages: int = 0

    def label(self, weights: Weights) -> str:
        """A name such as ``i4_4x8x2048_s4_w8_pdl4``."""
        return f"{self.shape.label(weights)}{f'_pdl{self.prefetch_stages or str()}' if self.pdl else ''}"


def stored(problem: Problem) -> Weights:
    """How b is stored: weights to be widened, or numbers of a's dtype."""
    return weights_of(problem) if problem.widens_b else Weights(bits=16, signed=True)


def words_of(weights: Weights) -> int:
    """Words of a column that a thread loads at once: four threads have one scale, and one zero point, for all of theirs."""
    return min(MOST_WORDS, *(factor.group * weights.bits // 128 or MOST_WORDS for factor in weights.factors.values()), MOST_WORDS)


def line_bytes(weights: Weights) -> int:
    """The bytes of a column that a warp reads at a time: of four threads, twice."""
    return 32 * words_of(weights)


def row_bytes(problem: Problem) -> int:
    """The bytes of a column of b, K numbers."""
    return problem.k * stored(problem).bits // 8


def tiles_of(problem: Problem, config: Config) -> int:
    """How many blocks b's columns have."""
    return -(-problem.n // config.shape.block_n)


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:  # noqa: ARG001 - the same for all
    """The legality predicate."""
    tiles = tiles_of(problem, config)
    if tiles > MOST_GRID:
        return f"{tiles} blocks of columns, at most {MOST_GRID} fit a dimension of a grid"
    needed, most = config.shape.registers(stored(problem)), registers_per_thread(config.shape.threads, 1)
    return f"needs about {needed} registers for each thread, {most} are left" if needed > most else None


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    """What a launch reads, at which rate; and what a warp does after its first loads."""
    shape, weights, tiles = config.shape, stored(problem), tiles_of(problem, config)
    resident, lines = shape.blocks_per_sm(weights), -(-row_bytes(problem) // line_bytes(weights))
    each = -(-tiles // device.sm_count)  # blocks of one multiprocessor, at most
    steps = -(-lines // shape.warps)
    held = min(shape.stages, steps) * TILE_N * shape.col_tiles * line_bytes(weights) * min(shape.warps, lines)
    on_their_way = min(tiles, device.sm_count * min(each, resident)) * held
    # Blocks that begin where others have ended even out what each multiprocessor has.
    uneven = each * device.sm_count / tiles if each <= resident else 1 + 0.5 * resident * device.sm_count / tiles
    rate = on_their_way / (on_their_way + HALF_RATE_BYTES) / uneven
    rounds = max(each / resident, 1.0)
    return LAUNCH_US + problem.bytes / DRAM_GBPS / rate / 1e3 + STEP_US * (max(steps - shape.stages, 0) + rounds - 1)


def candidates(problem: Problem, device: DeviceInfo) -> list[Config]:
    """Every shape, which begins early and fetches its first lines; the likeliest first."""
    found = [Config(shape=shape, pdl=True, prefetch_stages=shape.stages) for shape in SHAPES]
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), str(config)))
