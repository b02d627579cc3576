"""Configs for AMD GPUs: the compiler options of Triton for HIP, and the combinations to try.

No AMD GPU has measured any of this. Blocks pass through registers on their way to LDS, so there are at most two stages.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...problem import Problem
from .configs import BLOCKS_K, BLOCKS_M, BLOCKS_N, Config

STAGES = (1, 2)
"""Stages of a loop without prefetch (1), and of one that loads the next block while it multiplies this one (2)."""
SIDES = (16, 32)
"""Rows and columns of a matrix instruction's result (CDNA ISA, v_mfma)."""
XF32_K = 8
"""Elements along K of v_mfma_f32_16x16x8_xf32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HipConfig(Config):
    """Config with the options that Triton has only for HIP.

    ``matrix_instr_nonkdim`` is the side of an instruction's result, ``kpack`` the operands that a thread reads from LDS together,
    ``waves_per_eu`` the waves per SIMD that registers are left for; 0 lets the compiler decide.
    """

    matrix_instr_nonkdim: int = 16
    kpack: int = 1
    waves_per_eu: int = 0

    @property
    def variant(self) -> str:
        return f"_m{self.matrix_instr_nonkdim}_p{self.kpack}" + (f"_e{self.waves_per_eu}" if self.waves_per_eu else "")

    @property
    def compile_options(self) -> Mapping[str, int]:
        return {"matrix_instr_nonkdim": self.matrix_instr_nonkdim, "kpack": self.kpack, "waves_per_eu": self.waves_per_eu}


MODES: tuple[Mapping[str, int], ...] = (
    {"matrix_instr_nonkdim": 16, "kpack": 2, "waves_per_eu": 0}, {"matrix_instr_nonkdim": 32, "kpack": 2, "waves_per_eu": 2},
    {"matrix_instr_nonkdim": 16, "kpack": 1, "waves_per_eu": 2}, {"matrix_instr_nonkdim": 32, "kpack": 1, "waves_per_eu": 0},
)  # fmt: skip
"""Pairwise combinations of the three options: any two values of two options occur together once. Every tile tries the first."""
WAVE, SIMDS, ALL_REGISTERS = 64, 4, 512
"""Threads of a wavefront, SIMD units of a compute unit, and registers of a thread that has a SIMD alone."""
OTHER_REGISTERS = 32
"""Registers for addresses, masks and counters."""
MOST_SHARE, MOST_SHARE_OF_WAVES, MOST_SHARE_OF_ONE = 0.975, 0.8, 0.88
"""Maximum share of the available registers in an estimate. Several waves and one warp with many loads spill sooner."""
MASKED = 3 / 8
"""Extra registers for each register of a load whose last block along K is partial."""
CROWDED = 3 / 8
"""Extra registers for each sum if sums fill half of the registers and instructions use several contiguous ones.

That holds for instructions of 32 rows and columns, or of 32- and 64-bit numbers.
"""
CONVERTED = 1.5
"""Registers of a number that is converted after its load."""
NARROW, BYTE = 4, 2
"""Registers of an access narrower than a register: its address, its mask, and the result until it is packed.

The second value is for bytes where Triton exchanges numbers in registers: two bytes take one.
"""
REGISTER_BYTES, WIDEST_BYTES = 4, 16
"""Bytes of a thread's register, and of the widest access."""
LEAST_ELEMENTS, MOST_ELEMENTS = 1, 256
"""Bounds on the accumulators of one thread."""


@functools.cache
def hip_pool() -> tuple[Config, ...]:
    """Return every config without split-K that some problem may need, each with the first of MODES."""
    made = (
        HipConfig(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, warps=warps)
        for block_m, block_n, block_k in itertools.product(BLOCKS_M, BLOCKS_N, BLOCKS_K)
        for warps in (1, 2, 4, 8)
        if LEAST_ELEMENTS <= block_m * block_n // (WAVE * warps) <= MOST_ELEMENTS
        for stages in STAGES
    )
    return tuple(with_mode(config, MODES[0]) for config in made)


def with_mode(config: Config, mode: Mapping[str, int]) -> Config:
    """Return the config with one of MODES."""
    options: dict[str, Any] = dict(mode)
    return replace(config, **options)


def why_not_on_hip(config: Config, product: torch.dtype, *, tf32: bool) -> str | None:
    """Return why the matrix instructions do not support the config for operands of type ``product``, or None."""
    if not isinstance(config, HipConfig):
        return None
    side = config.matrix_instr_nonkdim
    if side not in SIDES:
        return f"matrix_instr_nonkdim {side}: matrix instructions have {' or '.join(map(str, SIDES))} rows and columns"
    if min(config.block_m, config.block_n) < side:
        return f"matrix_instr_nonkdim {side}: the tile is {config.block_m}x{config.block_n}"
    if product == torch.float64 and side != SIDES[0]:
        return f"matrix_instr_nonkdim {side}: float64 has instructions of {SIDES[0]} rows and columns only"
    if tf32 and side == SIDES[0] and config.kpack * XF32_K >= config.block_k:
        return f"kpack {config.kpack}: Triton 3.7 fails on tf32 if kpack covers all {config.block_k} elements along K"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Path of an operand to the matrix instructions: ``block`` rows of a, or columns of b, in accesses of ``width`` bytes."""

    block: int
    along_k: bool
    number_bytes: float
    width: int
    converted: bool


def hip_registers(
    problem: Problem,
    config: Config,
    product_bytes: int,
    reads: tuple[Read, Read],
    *,
    fresh: bool,
    transposes: bool,
    store_bytes: int,
) -> int:
    """Return an estimate of a thread's registers: the larger of the loop's and the store's need.

    ``product_bytes`` is the size of a multiplied number, ``store_bytes`` the width of accesses to the result. With ``fresh`` the
    sums of one step exist in addition to the tile's sums. ``transposes`` is ``Arch.register_transpose``. Accuracy was checked on
    1138 kernels of both architectures, most of them large. For 96 in 100 the estimate was 0.88 to 2.2 times the compiler's figure,
    for half at most 1.2 times.
    """
    elements = config.block_m * config.block_n / (config.warps * WAVE)
    sums = elements * problem.accumulator.itemsize / REGISTER_BYTES
    # Each store has its own address, and all addresses are computed together.
    behind = sums + elements * min(problem.out.dtype.itemsize / store_bytes, 1)
    side = config.matrix_instr_nonkdim if isinstance(config, HipConfig) else SIDES[0]
    warps_m = min(1 << (config.warps.bit_length() // 2), max(config.block_m // side, 1))
    held = (config.block_m // warps_m, max(config.block_n * warps_m // config.warps, side))
    loop = sums * (1 + fresh)
    for read, rows in zip(reads, held, strict=True):
        # Numbers not contiguous along K leave LDS one by one, unless they were exchanged before.
        single = not (read.along_k or transposes) and product_bytes < REGISTER_BYTES
        loop += rows * config.block_k / WAVE * (1 if single else product_bytes / REGISTER_BYTES)
        exchanged = not (read.along_k or single)
        loop += _loaded(read, config, masked=problem.k % config.block_k != 0, exchanged=exchanged, transposes=transposes)
    if 2 * sums >= most_hip_registers(config) and (side == SIDES[1] or product_bytes >= REGISTER_BYTES):
        loop += CROWDED * sums
    return OTHER_REGISTERS + int(max(loop, behind))


def _loaded(read: Read, config: Config, *, masked: bool, exchanged: bool, transposes: bool) -> float:
    """Return the registers of an operand's next block from memory to LDS: numbers, masks, addresses and conversions."""
    numbers = read.block * config.block_k / (config.warps * WAVE)
    registers = numbers * read.number_bytes / REGISTER_BYTES
    accesses = numbers * read.number_bytes / min(read.width, WIDEST_BYTES)
    if read.width == 1 or (read.width < REGISTER_BYTES and not transposes):
        accesses *= BYTE if transposes else NARROW
    return registers * (1 + exchanged + MASKED * masked) + accesses + CONVERTED * numbers * read.converted


def most_hip_registers(config: Config) -> int:
    """Return the maximum registers of a thread: a SIMD's 512 by the waves of a block, or ``waves_per_eu`` if larger."""
    waves = -(-config.warps // SIMDS)
    return ALL_REGISTERS // max(waves, config.waves_per_eu if isinstance(config, HipConfig) else 0)


def why_too_many_registers(need: int, config: Config) -> str | None:
    """Return why registers would spill on HIP, or None."""
    most, waves = most_hip_registers(config), isinstance(config, HipConfig) and config.waves_per_eu > 0
    share = MOST_SHARE_OF_WAVES if waves else MOST_SHARE_OF_ONE if config.warps == 1 else MOST_SHARE
    return f"registers: needs about {need} for each thread, {most} are available" if need > share * most else None


def with_modes(configs: Iterable[Config], count: int | None, legal: Callable[[Config], bool]) -> list[Config]:
    """Return half of ``count`` from ``configs``, and half with the other modes in rotation. None: all configs with all modes."""
    given, turns = list(configs), MODES[1:]
    kept = given if count is None else given[: -(-count // 2)]
    others: list[Config] = []
    for i, config in enumerate(kept):
        first = i % len(turns)
        able = [one for mode in (*turns[first:], *turns[:first]) if legal(one := with_mode(config, mode))]
        others += able if count is None else able[:1]
    made = [*kept, *others]
    return made if count is None else [*made, *given[len(kept) :]][:count]
