"""Family of kernels for block-sparse weights and few tokens: configs, legality, time model, source and launches.

The time model has an H200's rates and is not yet fitted to the kernel.
"""

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ....choice import Claims
from ....device import DeviceInfo
from ....problem import Problem
from ....toolchain.orientation import orient
from ....toolchain.record import A, Address, B, Record
from .. import kernel
from ..bsr.configs import FRAGMENT, FRAGMENT_BYTES
from ..bsr.packing import block_of, claims_of_blocks, why_not_weight
from ..family import INT32_LIMIT, Family
from ..hopper import MMA, SMEM_BYTES, SYSTEM_BYTES, registers_per_thread
from ..kernel import KernelSource
from .packing import HEAD_WORDS, WORD_BYTES, format_of, fragments_at, packed, panel_words, panels_of

TOKENS = (8, 16, 32)
"""Maximum tokens of a kernel, in whole warp products."""
BASE_REGISTERS = 20
"""Registers of a thread in addition to fragments, x and sums: numbers and addresses."""
MOST_RESIDENT_WARPS = 32
"""Maximum warps planned for a multiprocessor. More would leave too few registers for loads in flight."""
L1_BYTES = 160 * 1024
"""Part of the combined L1 and shared memory that is left to x."""
SKEW = 4.0
"""Assumed ratio of the longest row to the mean row, in blocks, for a skewed weight."""
LAUNCH_US, LATENCY_US = 2.0, 0.8
"""Minimum time of a launch, and the latency of a load from memory."""
SUM_US = 0.02
"""Time that each warp adds for the reduction of its sums."""
DRAM_GBPS = 4300.0
HALF_RATE_BYTES = 2 * 2**20
"""Bytes in flight on all multiprocessors that reach half of the bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Panel of 16 rows by ``block_n`` tokens. Its ``warps`` divide the blocks, with ``stages`` of ``stage_fragments`` in flight."""

    block_n: int
    warps: int
    stages: int
    stage_fragments: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the sums of each warp, in padded lines."""
        return self.warps * 4 * (FRAGMENT * self.block_n + 4 * max(FRAGMENT, self.block_n))

    @property
    def registers(self) -> int:
        x = self.stage_fragments * self.block_n // 4
        return BASE_REGISTERS + 4 * self.stages * self.stage_fragments + x + self.block_n // 2 + self.stage_fragments

    @property
    def blocks_per_sm(self) -> int:
        by_smem = (SMEM_BYTES + SYSTEM_BYTES - L1_BYTES) // (self.shared_bytes + SYSTEM_BYTES)
        most = max(min(MOST_RESIDENT_WARPS // self.warps, by_smem), 1)
        return next((n for n in range(most, 1, -1) if self.registers <= registers_per_thread(self.threads, n)), 1)

    @property
    def block_k(self) -> int:
        """Elements of K that all warps together multiply per stage."""
        return self.warps * self.stage_fragments * FRAGMENT

    def __str__(self) -> str:
        return f"{FRAGMENT}x{self.block_n}x{self.block_k}_s{self.stages}_w{self.warps}"


SIZES = ((4, 1, 4), (8, 1, 4), (16, 1, 4), (4, 2, 4), (8, 2, 4), (8, 4, 4), (4, 1, 8), (8, 1, 8), (8, 1, 2))
"""Combinations of warps, stages and fragments per stage."""
SHAPES: tuple[Shape, ...] = tuple(
    Shape(block_n=block_n, warps=warps, stages=stages, stage_fragments=stage_fragments)
    for block_n in TOKENS
    for warps, stages, stage_fragments in SIZES
)
"""All shapes. More bytes in flight per warp, or more warps, help long rows and weights with few panels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shape plus launch parameters. ``pdl``: the launch may begin before the previous one ends."""

    shape: Shape
    pdl: bool = False

    def __str__(self) -> str:
        return f"{self.shape}{'_pdl' * self.pdl}"


def loads_along_k(problem: Problem) -> bool | None:
    """Return True if a lane loads its elements of a token and block at once, False for pairs of tokens, None for neither."""
    (row, col), (tokens, _), offset = problem.a.stride, problem.a.size, problem.a.offset
    together = block_of(problem) // 4
    if col == 1 and (tokens == 1 or row % together == 0) and offset % together == 0:
        return True
    return False if row == 1 and tokens % 2 == 0 and col % 2 == 0 and offset % 2 == 0 else None


LOAD_BYTES = 16
"""Bytes that a lane loads from a fragment."""


class Work(kernel.Work):
    """Parameters of the kernel. ``rows`` and ``cols`` follow the storage order, ``columns`` counts blocks; others are in bytes."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("packed", ctypes.c_void_p), ("x", ctypes.c_void_p), ("fragments_at", ctypes.c_longlong), ("x_pitch", ctypes.c_longlong),
        ("panel_bytes", ctypes.c_int), ("columns", ctypes.c_int), ("tokens", ctypes.c_int), ("rows", ctypes.c_int),
        ("cols", ctypes.c_int), ("paired", ctypes.c_bool),
    )  # fmt: skip


class BsrSkinny(Family[Config]):
    """Family of ``bsr_skinny.cu.jinja``."""

    name = "bsr_skinny"
    package = __package__
    likely = 1.5
    instruction = MMA
    legal_between = True

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        if (reason := why_not_weight(problem, device)) is not None:
            return reason
        if problem.m > TOKENS[-1]:
            most = f"at most {TOKENS[-1]} are served"
            return f"x has {problem.m} tokens, {most}: sums of more would take the registers of weight blocks in flight"
        if problem.k >= INT32_LIMIT // WORD_BYTES:
            return f"K is {problem.k}: the columns of a panel would not fit 32 bits"
        if (along_k := loads_along_k(problem)) is None:
            where = f"x has strides {problem.a.stride} and offset {problem.a.offset}"
            together = block_of(problem) // 4
            return f"{where}: expected aligned rows of {together} elements along K, or an even number of contiguous tokens"
        if not along_k and problem.a.stride[-1] * 2 * problem.k >= INT32_LIMIT:
            return f"x spans {problem.a.stride[-1] * 2 * problem.k} bytes, offsets in it would not fit 32 bits"
        return None

    def why_not_config(self, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        shape = config.shape
        if problem.m > shape.block_n:
            return f"x has {problem.m} tokens, the kernel takes at most {shape.block_n}"
        if not loads_along_k(problem) and shape.block_n < FRAGMENT:
            return f"tokens are contiguous in x, which takes a kernel of at least {FRAGMENT} tokens, this one has {shape.block_n}"
        return device.why_no_smem(shape.shared_bytes)

    def candidates(self, problem: Problem, device: DeviceInfo) -> list[Config]:
        """Return the shapes with the fewest sufficient tokens, with PDL, best first."""
        legal = [shape.block_n for shape in SHAPES if self.why_not_config(problem, device, Config(shape=shape)) is None]
        found = [Config(shape=shape, pdl=True) for shape in SHAPES if shape.block_n == min(legal, default=TOKENS[-1])]
        return sorted(found, key=lambda config: (self.estimate_us(problem, device, config), str(config)))

    def estimate_us(self, problem: Problem, device: DeviceInfo, config: Config) -> float:
        """Return the model's time of a launch: bytes over bandwidth, or the longest row, whose loads wait for earlier ones."""
        shape, sparsity, panels = config.shape, problem.blocks, panels_of(problem.n)
        most = problem.k / FRAGMENT  # fragments of a panel that has all blocks
        mean = sparsity.density * most
        longest = min(SKEW * mean, most) if sparsity.imbalance == "skewed" else mean
        resident = min(shape.blocks_per_sm, -(-panels // device.sm_count))
        held = min(shape.warps * shape.stages * shape.stage_fragments, max(mean, 1.0)) * FRAGMENT_BYTES
        on_their_way = min(panels, device.sm_count * resident) * held
        rate = DRAM_GBPS * on_their_way / (on_their_way + HALF_RATE_BYTES)
        # Blocks that start as others end even out the load, except for the last ones.
        each = -(-panels // device.sm_count)
        uneven = each * device.sm_count / panels if each <= shape.blocks_per_sm else 1 + 0.25 * resident * device.sm_count / panels
        rounds = -(-longest // (shape.warps * shape.stages * shape.stage_fragments))
        moved = mean * panels * FRAGMENT_BYTES + 2.0 * problem.k * problem.m + problem.out.dtype.itemsize * problem.m * problem.n
        return LAUNCH_US + LATENCY_US + SUM_US * shape.warps + max(moved / rate / 1e3 * uneven, rounds * LATENCY_US)

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:  # noqa: ARG002 - always
        yield dataclasses.replace(config, pdl=not config.pdl)

    def claims(self, problem: Problem, config: Config) -> Claims:  # noqa: ARG002 - the same for all problems
        return claims_of_blocks(config.shape.warps)

    def info(self, problem: Problem, config: Config) -> dict[str, Any]:  # noqa: ARG002 - the same for all problems
        shape = config.shape
        return self.facts(config, (FRAGMENT, shape.block_n, shape.block_k), splits=shape.warps)

    def packed_format(self, problem: Problem, config: Config) -> str | None:  # noqa: ARG002 - one for all configs
        return format_of(block_of(problem))

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        return packed(b)

    def source(self, problem: Problem, config: Config) -> KernelSource:
        pointers = {"packed": "unsigned char const*", "x": "unsigned char const*"}
        return self.made(
            files=(kernel.STORE[0], *kernel.files_of(__package__, "device", "sums", "results")),
            values=kernel.common_values(problem, Work, pointers)
            | kernel.values_of(config.shape, "blocks_per_sm")
            | {
                "block": block_of(problem),
                "head_bytes": HEAD_WORDS * WORD_BYTES,
                "x_by_k": bool(loads_along_k(problem)),
                "transposed": stores_transposed(problem),
            },
        )

    def record(self, problem: Problem, config: Config) -> Record:
        along_k, block = loads_along_k(problem), block_of(problem)
        oriented = orient(problem, swap_ab=not stores_transposed(problem))
        work = kernel.work_of(Work, oriented.out, oriented.added)
        work.rows, work.cols = oriented.out.size
        work.tokens, work.columns = problem.m, problem.k // block
        work.x_pitch = problem.a.stride[0 if along_k else 1] * problem.dtype.itemsize
        work.panel_bytes = panel_words(problem.k, block) * WORD_BYTES
        work.fragments_at = fragments_at(problem.n, problem.k, block)
        work.paired, aligned = kernel.aligned_out(Work.paired, oriented.out, 2)
        return self.launch(
            problem,
            config,
            work,
            grid=(panels_of(problem.n), 1, 1),
            addresses=(Address(offset=Work.x.offset, operand=A), Address(offset=Work.packed.offset, operand=B)),
            aligned=aligned,
            alignment=((A, block // 4 * 2 if along_k else 4), (B, LOAD_BYTES)),
        )


def stores_transposed(problem: Problem) -> bool:
    """Return True if results are stored by tokens, because weight rows are contiguous in the result."""
    return problem.out.stride[-1] == 1
