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
"""Of a loop that loads the next block while it multiplies this one, or does not."""
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
MOST_SHARE, MOST_SHARE_OF_WAVES = 0.95, 0.8
"""The most that an estimate may be of the registers that there are. Of 257 kernels for both GPUs 27 spilled, of the 195 below these
shares seven. Where the compiler has to leave registers for several waves, it spills sooner."""
REGISTERS_OF_A_CONVERSION = 2
"""For each number of a thread that is converted on its way."""
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


def hip_registers(
    problem: Problem, config: Config, product_bytes: int, number_bytes: tuple[float, float], converted: tuple[bool, bool]
) -> int:
    """About the registers of a thread: sums, the next block on its way from memory, fragments of this one, and the rest.

    ``product_bytes`` is the size of what is multiplied, ``number_bytes`` what a and b have in memory; ``converted`` says whether
    they are converted on their way. Of thirteen kernels of both architectures that spilled nothing and converted nothing it was
    within a quarter of the compiler's figure, and of the large ones within a twentieth.
    """
    threads = config.warps * WAVE
    sums = config.block_m * config.block_n * problem.accumulator.itemsize
    warps_m = min(1 << (config.warps.bit_length() // 2), max(config.block_m // SIDES[0], 1))
    rows, cols = config.block_m // warps_m, max(config.block_n * warps_m // config.warps, SIDES[0])
    fragments = (rows + cols) * config.block_k * product_bytes // WAVE
    loads = 0.0
    for block, layout, dim, size in zip(
        (config.block_m, config.block_n), (problem.a, problem.b), (-1, -2), number_bytes, strict=True
    ):
        # What does not lie along K is exchanged between threads on its way.
        loads += block * config.block_k * size / threads * (1 if layout.stride[dim] == 1 else 2)
    blocks = sum(block for block, one in zip((config.block_m, config.block_n), converted, strict=True) if one)
    conversions = REGISTERS_OF_A_CONVERSION * blocks * config.block_k // threads
    return OTHER_REGISTERS + (sums // threads + fragments + int(loads)) // 4 + conversions


def most_hip_registers(config: Config) -> int:
    """Registers that a thread may have: a SIMD's 512, shared by the waves of a block on it, or by as many as are asked for."""
    waves = -(-config.warps // SIMDS)
    return ALL_REGISTERS // max(waves, config.waves_per_eu if isinstance(config, HipConfig) else 0)


def why_too_many_registers(need: int, config: Config) -> str | None:
    """Why registers would be spilled on HIP, or None."""
    most, waves = most_hip_registers(config), isinstance(config, HipConfig) and config.waves_per_eu > 0
    crowded = need > (MOST_SHARE_OF_WAVES if waves else MOST_SHARE) * most
    return f"registers: needs about {need} for each thread, {most} are left" if crowded else None


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
