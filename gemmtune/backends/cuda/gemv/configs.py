"""Shapes for one to four rows, their legality, and the time model that ranks them by an H200's rates."""

from dataclasses import dataclass

from ....device import DeviceInfo
from ....problem import Problem
from ..hopper import MOST_GRID, registers_per_thread
from ..mixed.weights import Weights, weights_of

BLOCK_M = 4
"""Maximum rows of a: half of the columns of a warp product."""
TILE_N = 8
"""Columns of b in a warp product: half of its rows."""
MOST_WORDS = 4
"""Maximum 32-bit words in one load of a thread."""
A_WORDS = 16
"""Maximum words of a's row that a thread holds in registers: one stage of 4-bit weights."""
BASE_REGISTERS, TILE_REGISTERS = 14, 8
"""Registers of a thread in addition to weights, rows and sums: numbers and addresses. The second value is per tile."""
MOST_RESIDENT_WARPS = 32
"""Maximum warps planned for a multiprocessor. More would leave too few registers for loads in flight."""
LAUNCH_US = 2.0
STEP_US = 0.1
"""Time of each line that a warp reads after its first ones, because its rows of a come from L1 just before."""
DRAM_GBPS = 4300.0
HALF_RATE_BYTES = 2 * 2**20
"""Bytes in flight on all multiprocessors that reach half of the bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Block of ``warps`` that divide K, for ``block_n`` columns of b, with ``stages`` lines of each in flight per warp."""

    block_n: int
    stages: int
    warps: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def col_tiles(self) -> int:
        return self.block_n // TILE_N

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block. It holds only sums: one set per half line and warp."""
        return 2 * self.warps * self.block_n * BLOCK_M * 4

    def a_stages(self, weights: Weights) -> int:
        """Return the stages whose rows of a are in flight or in registers."""
        return min(self.stages, A_WORDS * weights.bits // (16 * words_of(weights)))

    def registers(self, weights: Weights) -> int:
        words = words_of(weights)
        grouped = {name for name, factor in weights.factors.items() if factor.group}
        factors = self.stages * self.col_tiles * (("scale" in grouped) + 2 * ("zero" in grouped))
        loaded = self.stages * self.col_tiles * 2 * words + self.a_stages(weights) * words * 16 // weights.bits
        sums = (6 if "scale" in grouped else 4) + (4 if weights.zero else 0)
        return BASE_REGISTERS + loaded + factors + self.col_tiles * (TILE_REGISTERS + sums)

    def blocks_per_sm(self, weights: Weights) -> int:
        most = max(MOST_RESIDENT_WARPS // self.warps, 1)
        return next((n for n in range(most, 1, -1) if self.registers(weights) <= registers_per_thread(self.threads, n)), 1)

    def block_k(self, weights: Weights) -> int:
        """Return the elements of K that a block reads per step."""
        return self.warps * line_bytes(weights) * 8 // weights.bits

    def label(self, weights: Weights) -> str:
        """Return a name such as ``i4_4x8x2048_s4_w8``: rows, block_n, elements of K per step, stages, warps."""
        kind = f"i{weights.bits}_" if weights.bits < 16 else ""
        return f"{kind}{BLOCK_M}x{self.block_n}x{self.block_k(weights)}_s{self.stages}_w{self.warps}"


SHAPES: tuple[Shape, ...] = tuple(
    Shape(block_n=block_n, stages=stages, warps=warps)
    for block_n, stages, warps in ((8, 4, 8), (8, 4, 4), (8, 2, 8), (8, 2, 16), (8, 8, 4), (16, 2, 8), (16, 4, 4), (16, 4, 8))
)
"""Shapes with one or two column tiles, and with more bytes in registers or more warps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shape plus launch parameters.

    ``pdl``: the launch may begin before the previous one ends, and prefetches its first ``prefetch_stages`` into L2.
    """

    shape: Shape
    pdl: bool = False
    prefetch_stages: int = 0

    def label(self, weights: Weights) -> str:
        return f"{self.shape.label(weights)}{f'_pdl{self.prefetch_stages or str()}' if self.pdl else ''}"


def stored(problem: Problem) -> Weights:
    """Return the storage of b: narrow weights, or 16-bit numbers of a's dtype."""
    return weights_of(problem) if problem.widens_b else Weights(bits=16, signed=True)


def words_of(weights: Weights) -> int:
    """Return the words of a column in one load of a thread. The loads of four threads share one scale and one zero point."""
    return min(MOST_WORDS, *(factor.group * weights.bits // 128 or MOST_WORDS for factor in weights.factors.values()), MOST_WORDS)


def line_bytes(weights: Weights) -> int:
    """Return the bytes of a column that a warp reads per step: two loads of four threads."""
    return 32 * words_of(weights)


def row_bytes(problem: Problem) -> int:
    return problem.k * stored(problem).bits // 8


def tiles_of(problem: Problem, config: Config) -> int:
    """Return the number of blocks that cover b's columns."""
    return -(-problem.n // config.shape.block_n)


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:  # noqa: ARG001 - device-independent
    tiles = tiles_of(problem, config)
    if tiles > MOST_GRID:
        return f"{tiles} blocks of columns, at most {MOST_GRID} fit a dimension of a grid"
    needed, most = config.shape.registers(stored(problem)), registers_per_thread(config.shape.threads, 1)
    return f"needs about {needed} registers for each thread, {most} are left" if needed > most else None


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    """Return the model's time of a launch: bytes over bandwidth, and the steps after a warp's first loads."""
    shape, weights, tiles = config.shape, stored(problem), tiles_of(problem, config)
    resident, lines = shape.blocks_per_sm(weights), -(-row_bytes(problem) // line_bytes(weights))
    each = -(-tiles // device.sm_count)  # maximum blocks on one multiprocessor
    steps = -(-lines // shape.warps)
    held = min(shape.stages, steps) * TILE_N * shape.col_tiles * line_bytes(weights) * min(shape.warps, lines)
    on_their_way = min(tiles, device.sm_count * min(each, resident)) * held
    # Blocks that start as others end even out the load.
    uneven = each * device.sm_count / tiles if each <= resident else 1 + 0.5 * resident * device.sm_count / tiles
    rate = on_their_way / (on_their_way + HALF_RATE_BYTES) / uneven
    rounds = max(each / resident, 1.0)
    return LAUNCH_US + problem.bytes / DRAM_GBPS / rate / 1e3 + STEP_US * (max(steps - shape.stages, 0) + rounds - 1)


def candidates(problem: Problem, device: DeviceInfo) -> list[Config]:
    """Return every shape with PDL and prefetch, the likeliest first."""
    found = [Config(shape=shape, pdl=True, prefetch_stages=shape.stages) for shape in SHAPES]
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), str(config)))
