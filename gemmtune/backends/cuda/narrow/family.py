"""Family of kernels for few rows and narrow tiles: configs, legality, the time model with an H100's rates, and launches."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction, reduction_of
from ....problem import Problem
from ....problem.rules import why_not
from ....toolchain.orientation import orient
from ....toolchain.record import A, B, Record
from .. import columns, kernel, skinny
from ..boxes import LINE, by_k
from ..family import beginnings, float32_sums, why_not_epilogue, why_not_here
from ..hopper import BARRIER_BYTES, LINE_BYTES, MMA, MOST_GRID, SMEM_BYTES, SYSTEM_BYTES, TMA_BYTES, registers_per_thread
from ..kernel import KernelSource, common_values, files_of, values_of, work_of
from ..mixed.family import PTX, map_of_lines

TILE_M, TILE_N = 8, 16
"""Rows of a and columns of b in one product of a warp."""
BASE_REGISTERS = 8
"""Registers of a thread in addition to sums and numbers: addresses and counters."""
LAUNCH_US, TILE_US = 2.1, 0.1
"""Overhead of a launch, and of each eight rows of its tiles."""
CHAIN_NS, PRODUCT_NS = 17.0, 3.5
"""Time until the next 16 elements of K can be added to a sum, and of one product. A warp has a sum for each tile of rows."""
DRAM_GBPS, HALF_RATE_BYTES = 2900.0, 300_000
"""Bandwidth of memory, and bytes of b in flight on all multiprocessors that reach half of it."""
AGAIN = 0.75
"""Cost of reading b for each further row of tiles, as a share of reading it from memory."""
ARRIVING_GBPS = 88.0
"""Bandwidth into each multiprocessor."""
LEAST_ROWS, MOST_COLS = 5, 3072
"""Limits on rows and columns within which a search tries the kernel. Beyond them, kernels that divide K are faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tile of ``block_m`` by ``block_n``, with ``block_k`` elements of K per stage. ``warps_m`` warps share 16 columns."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps_m: int = 1

    @property
    def threads(self) -> int:
        return 32 * (self.warps_m * self.block_n // TILE_N + 1)

    @property
    def row_tiles(self) -> int:
        return self.block_m // TILE_M // self.warps_m

    @property
    def stage_bytes(self) -> int:
        return self.block_k // LINE * LINE_BYTES * (self.block_m + self.block_n)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: stages and their barriers."""
        return self.stages * (self.stage_bytes + 2 * BARRIER_BYTES)

    @property
    def registers(self) -> int:
        """Estimate of a thread's registers: two lines of both operands, and sums."""
        return BASE_REGISTERS + 2 * 16 + (2 * 8 + 4) * self.row_tiles

    @property
    def blocks_per_sm(self) -> int:
        """Blocks per multiprocessor. With several, a block of the next launch can start while one of the last ends."""
        most = (SMEM_BYTES + SYSTEM_BYTES) // (self.shared_bytes + SYSTEM_BYTES)
        return next((n for n in range(most, 1, -1) if self.registers <= registers_per_thread(self.threads, n)), 1)

    def __str__(self) -> str:
        warps = f"{self.warps_m}x{self.block_n // TILE_N}"
        return f"{self.block_m}x{self.block_n}x{self.block_k}_s{self.stages}_w{warps}"


SHAPES: tuple[Shape, ...] = tuple(
    Shape(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, warps_m=warps_m)
    for block_m, block_n, block_k, stages, warps_m in (
        (8, 16, 256, 4, 1),
        (8, 16, 256, 6, 1),
        (8, 16, 256, 8, 1),
        (8, 64, 128, 5, 1),
        (16, 16, 256, 7, 2),
        (16, 32, 512, 4, 2),
        (16, 64, 256, 5, 1),
        (24, 16, 512, 5, 3),
        (32, 16, 256, 9, 4),
        (32, 32, 256, 7, 2),
        (48, 16, 256, 7, 3),
        (48, 32, 256, 5, 2),
        (48, 64, 256, 4, 2),
        (64, 16, 256, 5, 4),
        (96, 16, 256, 4, 6),
        (96, 32, 128, 7, 3),
    )
)
"""Shapes that were the fastest of 77, or within 2%, for weights of 0.5 to 6 thousand columns on an H100.

Those of eight rows were the fastest of 27, or within 0.5%, for weights of 1.5 to 128 thousand columns.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shape plus launch parameters. ``pdl``: the launch may begin early, and prefetches its first ``prefetch_stages`` into L2."""

    shape: Shape
    pdl: bool = False
    prefetch_stages: int = 0

    def __str__(self) -> str:
        return f"{self.shape}{f'_pdl{self.prefetch_stages or str()}' if self.pdl else ''}"


def grid_of(problem: Problem, config: Config) -> tuple[int, int]:
    """Return the number of tiles along N and M."""
    return -(-problem.n // config.shape.block_n), -(-problem.m // config.shape.block_m)


OPERATIONS = ("mm", "addmm")
MOST_ROWS = 96
"""Maximum rows of a. With more, wider tiles read fewer bytes."""


class Work(kernel.Work):
    """Parameters of the narrow kernel. A step of K fills a stage."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("steps", ctypes.c_int), ("prefetch_stages", ctypes.c_int),
    )  # fmt: skip


class Narrow(columns.ColumnsFamily[Config]):
    """Family of ``narrow.cu.jinja``."""

    name = "narrow"
    package = __package__
    legal_between = True
    likely = 1.3
    instruction = MMA

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        if (reason := why_not(problem, OPERATIONS) or why_not_here(problem, device)) is not None:
            return reason
        if problem.m > MOST_ROWS:
            return f"a has {problem.m} rows, at most {MOST_ROWS} are served"
        for name, layout in (("a", problem.a), ("the transpose of b", columns.columns_of(problem))):
            if not by_k(layout):
                where = f"{name} has strides {layout.stride} and offset {layout.offset}"
                return f"{where}: TMA copies lines along K that are aligned to {TMA_BYTES} bytes"
        return why_not_epilogue(problem)

    def why_not_likely(self, problem: Problem, device: DeviceInfo, search: str) -> str | None:  # noqa: ARG002 - device-independent
        """Return the reason why a search does not try the kernel, or None. Batch invariance tries it for all sizes."""
        if search == "exhaustive" or (problem.m >= LEAST_ROWS and problem.n <= MOST_COLS):
            return None
        return f"a result of {problem.m}x{problem.n}: tried from {LEAST_ROWS} rows on and with up to {MOST_COLS} columns"

    def why_not_config(self, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        rows = grid_of(problem, config)[1]
        if rows > MOST_GRID:
            return f"{rows} tiles of rows, at most {MOST_GRID} fit a dimension of a grid"
        return device.why_no_smem(config.shape.shared_bytes)

    def candidates(self, problem: Problem, device: DeviceInfo) -> list[Config]:
        found = [Config(shape=shape, pdl=True) for shape in SHAPES]
        return sorted(found, key=lambda config: (self.estimate_us(problem, device, config), str(config)))

    def estimate_us(self, problem: Problem, device: DeviceInfo, config: Config) -> float:
        """Return the model's time of a launch: the longest of its chain of products, its bytes, and those of one multiprocessor."""
        shape, (cols, rows) = config.shape, grid_of(problem, config)
        each = -(-cols * rows // device.sm_count)  # maximum blocks on one multiprocessor
        resident = min(each, shape.blocks_per_sm)
        chain_us = problem.k / 16 * max(CHAIN_NS, PRODUCT_NS * shape.row_tiles) / 1e3 * -(-each // resident)
        arriving_us = each * problem.k / shape.block_k * shape.stage_bytes / ARRIVING_GBPS / 1e3
        in_flight = min(cols * rows, device.sm_count * resident) * shape.stages * shape.block_k * shape.block_n * 2
        read = problem.bytes + AGAIN * (rows - 1) * problem.n * problem.k * problem.dtype.itemsize
        idle = -(cols * rows) % (device.sm_count * resident) if each > resident else 0  # places of the last wave
        reading_us = read / DRAM_GBPS / 1e3 * (1 + HALF_RATE_BYTES / in_flight) * (1 + idle / (2 * cols * rows))
        return LAUNCH_US + TILE_US * shape.block_m / TILE_M + max(chain_us, arriving_us, reading_us)

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:  # noqa: ARG002 - always
        yield from beginnings(config, config.shape.stages)

    def claims(self, problem: Problem, config: Config) -> Claims:  # noqa: ARG002 - the same for all problems
        return float32_sums()

    def reduction(self, problem: Problem, config: Config) -> Reduction | None:  # noqa: ARG002 - the same for all configs
        return reduction_of(problem, "cuda")

    def info(self, problem: Problem, config: Config) -> dict[str, Any]:  # noqa: ARG002 - the config has it all
        return self.facts(config, (config.shape.block_m, config.shape.block_n, config.shape.block_k))

    def source(self, problem: Problem, config: Config) -> KernelSource:
        values = common_values(problem, Work) | values_of(config.shape, "blocks_per_sm")
        return self.made((PTX, *files_of(skinny.__name__, "device")), values)

    def record(self, problem: Problem, config: Config) -> Record:
        shape, work = config.shape, work_of(Work, problem.out, orient(problem, swap_ab=False).added)
        work.rows, work.cols, work.prefetch_stages = problem.m, problem.n, config.prefetch_stages
        work.steps = -(-problem.k // shape.block_k)
        maps = map_of_lines(A, problem.a, shape.block_m), map_of_lines(B, columns.columns_of(problem), shape.block_n)
        return self.launch(problem, config, work, maps, grid=(*grid_of(problem, config), 1))
