"""Configs for AMD GPUs: what Triton's compiler for HIP is told beside tile, stages and warps, and which of it is tried.

No AMD GPU has measured any of it. Blocks pass through registers on their way to LDS, so that two stages are what there is.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...problem import Problem
from .configs import BLOCKS_K, BLOCKS_M, BLOCKS_N, Config

STAGES = (1, 2)
"""The stages of a loop that does not load the next block while it multiplies this one, and of one that does."""
SIDES = (16, 32)
"""Rows and columns of a matrix instruction's result (CDNA ISA, v_mfma)."""
XF32_K = 8
"""Elements along K of v_mfma_f32_16x16x8_xf32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HipConfig(Config):
    """A config with the options that Triton has for HIP alone.

    ``matrix_instr_nonkdim`` is the side of the matrix instruction's result, ``kpack`` how many of its operands a thread reads from
    LDS together, ``waves_per_eu`` for how many waves of a SIMD the compiler leaves registers, 0 for its own judgement.
    """

    matrix_instr_nonkdim: int = 16
    kpack: int = 1
    waves_per_eu: int = 0

    @property
    def variant(self) -> str:
        """What the name of such a config has beside that of the mm template."""
        return f"_m{self.matrix_instr_nonkdim}_p{self.kpack}" + (f"_e{self.waves_per_eu}" if self.waves_per_eu else "")

    @property
    def compile_options(self) -> Mapping[str, int]:
        """What the compiler is told beside stages and warps."""
        return {"matrix_instr_nonkdim": self.matrix_instr_nonkdim, "kpack": self.kpack, "waves_per_eu": self.waves_per_eu}


MODES: tuple[Mapping[str, int], ...] = (
    {"matrix_instr_nonkdim": 16, "kpack": 2, "waves_per_eu": 0},
    {"matrix_instr_nonkdim": 32, "kpack": 2, "waves_per_eu": 2},
    {"matrix_instr_nonkdim": 16, "kpack": 1, "waves_per_eu": 2},
    {"matrix_instr_nonkdim": 32, "kpack": 1, "waves_per_eu": 0},
)
"""Values of the three options such that any two values of two of them are together once. The first is tried with every tile."""
WAVE, SIMDS, ALL_REGISTERS = 64, 4, 512
"""Threads of a wavefront, SIMD units of a compute unit, and registers of a thread that has a SIMD for itself."""
OTHER_REGISTERS = 32
"""Addresses, masks and counters."""
MOST_SHARE, MOST_SHARE_OF_WAVES, MOST_SHARE_OF_ONE = 0.975, 0.8, 0.88
"""The most that an estimate may be of the registers that there are. Where the compiler has to leave registers for several waves it
spills sooner, and so it does for a block of one warp, whose loads are many."""
MASKED = 3 / 8
"""Registers more for each register of a load whose last block along K is not whole."""
CROWDED = 3 / 8
"""Registers more for each sum where sums take half of what there is, and what an instruction takes or gives lies in several of them
in a row (of 32 rows and columns, or of 32 and 64 bits): the compiler then finds no room for all of them."""
CONVERTED = 1.5
"""Registers of a number that is converted on its way."""
NARROW, BYTE = 4, 2
"""Registers of an access that is narrower than one, for its place, its mask and the result, which waits to be packed; and of a byte
where Triton exchanges numbers in registers, where two bytes take one."""
REGISTER_BYTES, WIDEST_BYTES = 4, 16
"""Bytes of a register of a thread, and of the widest access."""
LEAST_ELEMENTS, MOST_ELEMENTS = 1, 256
"""Accumulators of a thread."""


@functools.cache
def hip_pool() -> tuple[Config, ...]:
    """Every config without splits that some problem could want, each with the first of MODES."""
    made = (
        HipConfig(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, warps=warps)
        for block_m, block_n, block_k in itertools.product(BLOCKS_M, BLOCKS_N, BLOCKS_K)
        for warps in (1, 2, 4, 8)
        if LEAST_ELEMENTS <= block_m * block_n // (WAVE * warps) <= MOST_ELEMENTS
        for stages in STAGES
    )
    return tuple(with_mode(config, MODES[0]) for config in made)


def with_mode(config: Config, mode: Mapping[str, int]) -> Config:
    """The config with one of MODES."""
    options: dict[str, Any] = dict(mode)
    return replace(config, **options)


def why_not_on_hip(config: Config, product: torch.dtype, *, tf32: bool) -> str | None:
    """Why the matrix instructions cannot be used as a config says for products of such operands, or None."""
    if not isinstance(config, HipConfig):
        return None
    side = config.matrix_instr_nonkdim
    if side not in SIDES:
        return f"matrix_instr_nonkdim {side}: matrix instructions have {' or '.join(map(str, SIDES))} rows and columns"
    if min(config.block_m, config.block_n) < side:
        return f"matrix_instr_nonkdim {side}: the tile is {config.block_m}x{config.block_n}"
    if product == torch.float64 and side != SIDES[0]:
        return f"matrix_instr_nonkdim {side}: float64 has instructions of {SIDES[0]} rows and columns alone"
    if tf32 and side == SIDES[0] and config.kpack * XF32_K >= config.block_k:
        return f"kpack {config.kpack}: Triton 3.7 fails on tf32 where it is all of the {config.block_k} elements along K"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """How an operand reaches the matrix instructions: ``block`` rows of a, or columns of b, by accesses of ``width`` bytes.

    ``number_bytes`` is what a number has in memory; ``converted`` says whether it is converted on its way.
    """

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
    """About the registers of a thread: in the loop, or behind it, whichever needs more.

    ``product_bytes`` is the size of what is multiplied, ``store_bytes`` the width of accesses to the result. ``fresh`` says that
    the sums of one step are beside those that they are added to, ``transposes`` is ``Arch.register_transpose``. Of 1138 kernels of
    both architectures, most of them large, 96 in 100 were estimated at 0.88 to 2.2 times the compiler's figure, half at up to
    1.2 times.
    """
    elements = config.block_m * config.block_n / (config.warps * WAVE)
    sums = elements * problem.accumulator.itemsize / REGISTER_BYTES
    # Each store has an address of its own, and they are computed together.
    behind = sums + elements * min(problem.out.dtype.itemsize / store_bytes, 1)
    side = config.matrix_instr_nonkdim if isinstance(config, HipConfig) else SIDES[0]
    warps_m = min(1 << (config.warps.bit_length() // 2), max(config.block_m // side, 1))
    held = (config.block_m // warps_m, max(config.block_n * warps_m // config.warps, side))
    loop = sums * (1 + fresh)
    for read, rows in zip(reads, held, strict=True):
        # Numbers that do not lie along K come out of LDS one by one, unless they were exchanged on their way there.
        single = not (read.along_k or transposes) and product_bytes < REGISTER_BYTES
        loop += rows * config.block_k / WAVE * (1 if single else product_bytes / REGISTER_BYTES)
        exchanged = not (read.along_k or single)
        loop += _loaded(read, config, masked=problem.k % config.block_k != 0, exchanged=exchanged, transposes=transposes)
    if 2 * sums >= most_hip_registers(config) and (side == SIDES[1] or product_bytes >= REGISTER_BYTES):
        loop += CROWDED * sums
    return OTHER_REGISTERS + int(max(loop, behind))


def _loaded(read: Read, config: Config, *, masked: bool, exchanged: bool, transposes: bool) -> float:
    """Registers of an operand's next block on its way from memory to LDS: numbers, masks, addresses, and what conversions take."""
    numbers = read.block * config.block_k / (config.warps * WAVE)
    registers = numbers * read.number_bytes / REGISTER_BYTES
    accesses = numbers * read.number_bytes / min(read.width, WIDEST_BYTES)
    if read.width == 1 or (read.width < REGISTER_BYTES and not transposes):
        accesses *= BYTE if transposes else NARROW
    return registers * (1 + exchanged + MASKED * masked) + accesses + CONVERTED * numbers * read.converted


def most_hip_registers(config: Config) -> int:
    """Registers that a thread may have: a SIMD's 512, shared by the waves of a block on it, or by as many as are asked for."""
    waves = -(-config.warps // SIMDS)
    return ALL_REGISTERS // max(waves, config.waves_per_eu if isinstance(config, HipConfig) else 0)


def why_too_many_registers(need: int, config: Config) -> str | None:
    """Why registers would be spilled on HIP, or None."""
    most, waves = most_hip_registers(config), isinstance(config, HipConfig) and config.waves_per_eu > 0
    share = MOST_SHARE_OF_WAVES if waves else MOST_SHARE_OF_ONE if config.warps == 1 else MOST_SHARE
    return f"registers: needs about {need} for each thread, {most} are left" if need > share * most else None


def with_modes(configs: Iterable[Config], count: int | None, legal: Callable[[Config], bool]) -> list[Config]:
    """Half of ``count`` places for the first of ``configs`` as they are, half for the same with the other modes, which take turns.

    With None, all configs with all modes.
    """
    given, turns = list(configs), MODES[1:]
    kept = given if count is None else given[: -(-count // 2)]
    others: list[Config] = []
    for i, config in enumerate(kept):
        first = i % len(turns)
        able = [one for mode in (*turns[first:], *turns[:first]) if legal(one := with_mode(config, mode))]
        others += able if count is None else able[:1]
    made = [*kept, *others]
    return made if count is None else [*made, *given[len(kept) :]][:count]
