"""Shared memory and registers that a config needs for one block of threads."""

from __future__ import annotations

from dataclasses import dataclass

from ...device import DeviceInfo
from ...problem import Problem
from .arch import arch_of
from .configs import Config

BASE_REGISTERS = 32
"""Registers for addresses, masks and loop counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Needs of a config: an upper bound of its shared memory, and an estimate of one thread's registers."""

    smem_bytes: int
    registers: int

    def why_not_on(self, device: DeviceInfo) -> str | None:
        """Return which resource the device lacks, or None."""
        most = arch_of(device).registers_per_thread
        lacking = f"registers: needs about {self.registers} for each thread, {device.arch} has {most}"
        return device.why_no_smem(self.smem_bytes) or (lacking if self.registers > most else None)


def most_fma_elements(problem: Problem, config: Config) -> int:
    """Return the most accumulators per thread with which an FMA kernel, on every architecture, keeps fragments in registers."""
    if config.block_k > 32:
        return 0
    if problem.dtype.itemsize <= 2 or problem.widens_b:
        return 512 // config.block_k
    return 64 if problem.dtype.itemsize == 4 else 32


def fragment_registers(config: Config, itemsize: int, warp_size: int) -> int:
    """Return the registers of the operand fragments that a warp of an mma holds at a time."""
    warps_m = min(config.warps, max(config.block_m // 16, 1))
    warps_n = max(config.warps // warps_m, 1)
    rows, cols = config.block_m // warps_m, max(config.block_n // warps_n, 8)
    return (rows + cols) * config.block_k * itemsize // 4 // warp_size
