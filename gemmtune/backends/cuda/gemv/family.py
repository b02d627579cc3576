"""Family of kernels for one to four rows: configs, legality, the time model with an H200's rates, and launches."""

import ctypes
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction, reduction_of
from ....problem import Problem
from ....problem.dtypes import dtype_name
from ....problem.rules import why_not
from ....toolchain.record import A, Address, B, Record
from ...cpp.printer import STORAGE_TYPES
from .. import columns, kernel
from ..family import beginnings, float32_sums, why_not_epilogue, why_not_here
from ..hopper import MMA, registers_per_thread
from ..kernel import KernelSource, common_values, files_of, values_of, work_of
from ..mixed.family import NUMBERS, PTX, matrix
from ..mixed.weights import Weights, weights_of

BLOCK_M = 4
"""Maximum rows of a: half of the columns of a warp product."""
TILE_N = 8
"""Columns of b in a warp product: half of its rows."""
MOST_WORDS = 4
"""Maximum 32-bit words in one load of a thread."""
A_WORDS = 16
"""Maximum words of a's row that a thread holds in registers: one stage of 4-bit weights."""
BASE_REGISTERS, TILE_REGISTERS = 18, 8
"""Registers of a thread in addition to weights, rows and sums: numbers and addresses. The second value is per tile."""
MOST_RESIDENT_WARPS = 32
"""Maximum warps planned for a multiprocessor. More would leave too few registers for loads in flight."""
LAUNCH_US, ROUND_US, STEP_US = 2.2, 0.04, 0.02
"""Times of a launch, of each round of tiles, and of each line that a warp reads after its first ones."""
DRAM_GBPS = 4800.0
WIDEN_US = {4: 0.06, 8: 0.04, 16: 0.012}
"""Time to widen and multiply a million weights, by bits, with USUAL_WARPS warps on each multiprocessor."""
USUAL_WARPS = 16
ROWS_SHARE = 0.8
"""Part that is added to WIDEN_US for loads of a's rows, which the tiles of a warp share."""


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
        """Shared memory of a block. It holds only sums: one set per half line and warp, of two tiles in turn."""
        return 2 * 2 * self.warps * self.block_n * BLOCK_M * 4

    def a_stages(self, weights: Weights) -> int:
        """Return the stages whose rows of a are in flight or in registers."""
        return min(self.stages, A_WORDS * weights.bits // (16 * words_of(weights)))

    def registers(self, weights: Weights) -> int:
        words = words_of(weights)
        grouped = {name for name, factor in weights.factors.items() if factor.group}
        factors = self.stages * self.col_tiles * (("scale" in grouped) + 2 * ("zero" in grouped))
        loaded = self.stages * self.col_tiles * 2 * words + self.a_stages(weights) * words * 16 // weights.bits
        sums = (6 if "scale" in grouped else 4) + (4 if weights.zero else 0) + 2 * ("zero" in grouped)
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
    for block_n, stages, warps in (
        *itertools.product((8, 16, 24, 32), (1,), (8, 16)),
        *((8, 2, 8), (8, 2, 16), (8, 4, 8), (16, 2, 8)),
    )
)
"""Shapes with many warps of one line in flight, since integers take time to widen, and with more lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shape plus launch parameters. ``pdl``: the launch may begin early, and prefetches its first ``prefetch_stages`` into L2.

    The device's ``multiprocessors`` limit the persistent blocks that walk over the tiles.
    """

    shape: Shape
    multiprocessors: int = 132
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
    """Return the number of tiles that cover b's columns."""
    return -(-problem.n // config.shape.block_n)


def blocks_of(problem: Problem, config: Config) -> int:
    """Return the number of blocks: as few as need no more rounds of tiles than all that fit the device at once."""
    tiles = tiles_of(problem, config)
    rounds = -(-tiles // (config.multiprocessors * config.shape.blocks_per_sm(stored(problem))))
    return -(-tiles // rounds)


OPERATIONS = ("mm", "addmm", "mixed_mm")
LOAD_BYTES = columns.ALIGNED_BYTES
"""Bytes of one load. Rows of a and columns of b are aligned to it."""

MOST_BYTES = 2**30
"""Maximum bytes of a column, and maximum columns, so that offsets past the end fit 32 bits too."""


class Work(kernel.Work):
    """Parameters of the gemv kernel. ``row_bytes`` is the size of a column of b; pitches are in bytes."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("a_pitch", ctypes.c_longlong), ("b_pitch", ctypes.c_longlong),
        ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("row_bytes", ctypes.c_int), ("prefetch_stages", ctypes.c_int),
    )  # fmt: skip


class Gemv(columns.ColumnsFamily[Config]):
    """Family of ``gemv.cu.jinja``."""

    name = "gemv"
    package = __package__
    legal_between = True
    likely = 1.3
    instruction = MMA

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        if (reason := why_not(problem, OPERATIONS) or why_not_here(problem, device)) is not None:
            return reason
        if problem.m > BLOCK_M:
            return f"a has {problem.m} rows, at most {BLOCK_M} are served"
        if problem.widens_b and problem.b.dtype not in (torch.int8, torch.uint8):
            return f"b is {dtype_name(problem.b.dtype)}, expected integers"
        return _why_not_operands(problem) or why_not_epilogue(problem)

    def why_not_config(self, problem: Problem, device: DeviceInfo, config: Config) -> str | None:  # noqa: ARG002 - device-independent
        needed, most = config.shape.registers(stored(problem)), registers_per_thread(config.shape.threads, 1)
        return f"needs about {needed} registers for each thread, {most} are left" if needed > most else None

    def candidates(self, problem: Problem, device: DeviceInfo) -> list[Config]:
        """Return every shape with PDL and prefetch, the likeliest first."""
        found = [Config(shape=x, multiprocessors=device.sm_count, pdl=True, prefetch_stages=x.stages) for x in SHAPES]
        return sorted(found, key=lambda config: (self.estimate_us(problem, device, config), str(config)))

    def estimate_us(self, problem: Problem, device: DeviceInfo, config: Config) -> float:
        """Return the model's time of a launch: reading and widening, which idle warps of the last round lengthen.

        It was fitted to 120 GEMMs with one, two and four rows on an H200. Its first shape takes 4% longer than the fastest on
        average, and 16% at the 95th percentile. The fastest of its first four takes 1% and 5% longer.
        """
        shape, weights, tiles = config.shape, stored(problem), tiles_of(problem, config)
        blocks, lines = blocks_of(problem, config), -(-row_bytes(problem) // line_bytes(weights))
        rounds, each, steps = -(-tiles // blocks), -(-blocks // device.sm_count), -(-lines // shape.warps)
        filled = tiles / (rounds * each * device.sm_count) * lines / (steps * shape.warps)
        reading = problem.n * row_bytes(problem) / DRAM_GBPS / 1e3
        widening = WIDEN_US[weights.bits] * problem.n * problem.k / 1e6 * (1 + ROWS_SHARE / shape.col_tiles)
        work = reading + widening * math.pow(USUAL_WARPS / (each * shape.warps), 0.25)
        return LAUNCH_US + work / math.sqrt(filled) + ROUND_US * rounds + STEP_US * max(rounds * steps / shape.stages - 1, 0)

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:  # noqa: ARG002 - always
        yield from beginnings(config, config.shape.stages)

    def label(self, problem: Problem, config: Config) -> str:
        return config.label(stored(problem))

    def claims(self, problem: Problem, config: Config) -> Claims:
        """Return the claims: half lines are summed apart, and weights with zero points are rounded to a's dtype."""
        return float32_sums(splits=2 * config.shape.warps, weights=problem.dtype if stored(problem).zero else None)

    def reduction(self, problem: Problem, config: Config) -> Reduction | None:
        """Return sums of half lines and warps, added in rising order."""
        order = f"{2 * config.shape.warps} half lines, {config.shape.block_k(stored(problem))} a stage"
        return reduction_of(problem, "cuda", order=order, own="cuda gemv")

    def info(self, problem: Problem, config: Config) -> dict[str, Any]:
        shape = config.shape
        return self.facts(config, (BLOCK_M, shape.block_n, shape.block_k(stored(problem))), splits=2 * shape.warps)

    def source(self, problem: Problem, config: Config) -> KernelSource:
        shape, weights = config.shape, stored(problem)
        common = common_values(problem, Work, {"a": "unsigned char const*", "b": "unsigned char const*"})
        first, scale = common["first_operand"], weights.scale
        read_at_end = [(0, STORAGE_TYPES[scale.dtype])] if scale is not None and not scale.group else []
        files = (PTX, NUMBERS) if weights.bits < 16 else (PTX,)
        return self.made(
            files=(*files, *files_of(__package__, "device", "sums", "store")),
            values=common
            | values_of(shape)
            | weights.values
            | {
                "name": shape.label(weights),
                "read_at_end": [*read_at_end, *((first + i, one) for i, one in enumerate(common["operands"]))],
                "words": words_of(weights),
                "a_stages": shape.a_stages(weights),
                "blocks_per_sm": shape.blocks_per_sm(weights),
            },
        )

    def record(self, problem: Problem, config: Config) -> Record:
        extra = problem.epilogue.operands if problem.epilogue else ()
        added = extra if problem.inp_read is None else (problem.inp_read, *extra)
        operands = [*map(matrix, problem.scales), *(x.expanded(problem.out.size) for x in added)]
        work = work_of(Work, problem.out, operands)
        work.a_pitch, work.b_pitch = (x.stride[0] * x.dtype.itemsize for x in (problem.a, columns.columns_of(problem)))
        work.rows, work.cols, work.row_bytes = problem.m, problem.n, row_bytes(problem)
        work.prefetch_stages = config.prefetch_stages
        return self.launch(
            problem,
            config,
            work,
            grid=(1, blocks_of(problem, config), 1),
            addresses=(Address(offset=Work.a.offset, operand=A), Address(offset=Work.b.offset, operand=B)),
            alignment=((A, LOAD_BYTES), (B, LOAD_BYTES)),
        )


def _why_not_operands(problem: Problem) -> str | None:
    """Return the reason why rows of a or columns of b do not allow 16-byte loads, or None."""
    chunk = LOAD_BYTES * 8 // stored(problem).bits
    if problem.k % chunk:
        return f"K is {problem.k}, expected a multiple of {chunk}"
    if problem.n >= MOST_BYTES:
        return f"N is {problem.n}, expected less than {MOST_BYTES}"
    steps = [abs(stride) for layout in problem.scales for stride in layout.stride]
    if max(row_bytes(problem), *steps, 0) >= MOST_BYTES:
        apart = f"{max(steps, default=0)} elements between scales"
        return f"a column of b has {row_bytes(problem)} bytes, with up to {apart}: expected less than {MOST_BYTES}"
    for name, layout, where in (
        ("a", problem.a, "rows"),
        ("the transpose of b", columns.columns_of(problem), "rows (columns of b)"),
    ):
        if not columns.has_aligned_rows(layout):
            strides = f"has strides {layout.stride} and offset {layout.offset}"
            return f"{name} {strides}: it is loaded in contiguous {where} that are aligned to {LOAD_BYTES} bytes"
    return None
