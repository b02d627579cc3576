"""One predicate says whether a config may be offered for a problem on a device, before anything is compiled.

The shared-memory model follows what Triton's pipeliner allocates and is a close upper bound: tests compare it with real kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...device import DeviceInfo
from ...problem import Problem
from ...problem.layout import ALIGNED_BYTES
from ...problem.rules import why_not_dense
from .arch import arch_of
from .configs import Config
from .spec import KernelSpec, OperandClass, divisor, specialise

__all__ = ["Predicate", "Resources", "check", "check_problem", "estimate"]

INT32_LIMIT = 2**31
MOST_SPLITS = 65535
MOST_WORKSPACE_BYTES = 256 * 2**20
ASYNC_BYTES = 4
"""The narrowest copy that can go to shared memory without passing through registers (cp.async, PTX ISA)."""
LEAST_BLOCK = 16
"""The least side of a tile that ``tl.dot`` takes on every target."""
MOST_THREADS = 1024
LEAST_ROW_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a config will need: an upper bound of its shared memory, and an estimate of the registers of one thread."""

    smem_bytes: int
    registers: int


def check_problem(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no config at all can serve the problem on this device, or None."""
    reason = why_not_dense(problem)
    if reason is not None:
        return reason
    if problem.empty:
        return "the result has no elements: nothing is launched"
    if problem.prepacked and problem.device_type != "cpu":
        return "prepacked operands are served on the CPU only"
    if problem.precision.input_mode not in ("ieee", "tf32"):
        return f"input mode {problem.precision.input_mode}: only ieee and tf32 are known"
    if max(problem.m, problem.n, problem.k, problem.batch) >= INT32_LIMIT:
        return "a size does not fit 32 bits"
    if device.type == "cuda" and device.capability < 75:
        return f"{device.arch}: Triton compiles for sm75 and newer"
    return None


def check(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered, or None if it is legal. Assumes that ``check_problem`` found nothing."""
    return Predicate(problem, device).check(config)


def estimate(problem: Problem, device: DeviceInfo, config: Config) -> Resources:
    """Shared memory and registers of ``config``, compiled for ``problem`` on ``device``."""
    return Predicate(problem, device).resources(config)


class Predicate:
    """``check`` and ``estimate`` for many configs of one problem: what depends on the problem alone is worked out once."""

    def __init__(self, problem: Problem, device: DeviceInfo) -> None:
        self.problem = problem
        self.device = device
        self.arch = arch_of(device)
        self.least_bytes = problem.bytes
        self._staging: dict[int, tuple[Staging, Staging]] = {}

    def check(self, config: Config) -> str | None:
        """Why ``config`` may not be offered, or None."""
        device = self.device
        reason = _check_shape(self.problem, config)
        if reason or device.type == "cpu":
            return reason
        threads = config.warps * device.warp_size
        if threads > MOST_THREADS:
            return f"{config.warps} warps of {device.warp_size}: more than {MOST_THREADS} threads"
        if self.instruction(config) != "fma" and config.block_k * self.problem.dtype.itemsize < LEAST_ROW_BYTES:
            return f"block_k {config.block_k}: rows of less than {LEAST_ROW_BYTES} bytes starve a tensor core"
        if self.instruction(config) == "fma":
            most = _most_fma_elements(self.problem, config)
            if config.block_m * config.block_n > most * threads:
                return f"registers: {most} accumulators of a thread are the most where FMAs multiply {self.problem.dtype_label}"
        if config.stages > 1 and not any(staged.asynchronous for staged in self.staging(config)):
            return f"stages {config.stages}: neither operand can be copied asynchronously, so that stages change nothing"
        need = self.resources(config)
        if need.smem_bytes > device.smem_per_block_bytes:
            return f"shared memory: needs {need.smem_bytes} bytes, a block of {device.arch} has {device.smem_per_block_bytes}"
        if need.registers > self.arch.registers_per_thread:
            return f"registers: needs about {need.registers} for each thread, {device.arch} has {self.arch.registers_per_thread}"
        return None

    def check_split(self, config: Config) -> str | None:
        """``check`` for a config that is legal without splits: they change no resource of a program."""
        tiles = -(-self.problem.m // config.block_m) * -(-self.problem.n // config.block_n) * self.problem.batch
        return _check_split(self.problem, config, tiles)

    def instruction(self, config: Config) -> str:
        """Which instruction multiplies: ``fma``, ``mma`` (one warp) or ``warp_group`` (wgmma, tcgen05)."""
        arch, dtype = self.arch, self.problem.dtype
        if dtype == torch.float64:
            return "mma" if arch.fp64_tensor_core else "fma"
        if not arch.tensor_core or (dtype == torch.float32 and self.problem.precision.input_mode == "ieee"):
            return "fma"
        return "warp_group" if arch.warp_group and config.block_m >= 64 and config.warps % 4 == 0 else "mma"

    def resources(self, config: Config) -> Resources:
        """An upper bound of the shared memory, and an estimate of the registers."""
        staging, how = self.staging(config), self.instruction(config)
        return Resources(smem_bytes=self._smem_bytes(config, how, staging), registers=self._registers(config, how, staging))

    def staging(self, config: Config) -> tuple[Staging, Staging]:
        """How a and b reach shared memory."""
        staging = self._staging.get(config.block_k)
        if staging is None:
            staging = self._staging[config.block_k] = self._stage(config)
        return staging

    def _stage(self, config: Config) -> tuple[Staging, Staging]:
        spec = specialise(self.problem, config)
        mask_a, mask_b = _mask_divisors(spec)
        widths = (vector_bytes(spec.a, mask_divisor=mask_a), vector_bytes(spec.b, mask_divisor=mask_b))
        hip = self.device.type == "hip"
        a, b = (Staging(width=w, asynchronous=hip or (self.arch.async_copy and w >= ASYNC_BYTES)) for w in widths)
        return a, b

    def _smem_bytes(self, config: Config, how: str, staging: tuple[Staging, Staging]) -> int:
        problem, arch = self.problem, self.arch
        acc_bytes = problem.accumulator.itemsize
        # Triton widens 16-bit operands of an FMA to the accumulator's type on their way.
        itemsize = max(problem.dtype.itemsize, acc_bytes) if how == "fma" else problem.dtype.itemsize
        buffers = config.stages if how == "warp_group" else max(config.stages - 1, 1)
        waiting = min(arch.sync_buffers, config.stages) if how == "warp_group" else 1
        a, b = staging
        rows = config.block_m * (buffers if a.asynchronous else waiting) + config.block_n * (buffers if b.asynchronous else waiting)
        # The tile on its way from the layout of the accumulator to that of the store reuses the memory of the stages.
        converted = config.block_m * config.block_n * max(acc_bytes, problem.out.dtype.itemsize)
        return max(rows * config.block_k * itemsize, converted) + arch.barrier_bytes

    def _registers(self, config: Config, how: str, staging: tuple[Staging, Staging]) -> int:
        threads = config.warps * self.device.warp_size
        itemsize = self.problem.dtype.itemsize
        total = BASE_REGISTERS + config.block_m * config.block_n * self.problem.accumulator.itemsize // 4 // threads
        if how == "fma":
            return total
        if how == "mma":
            total += _fragment_registers(config, itemsize, self.device.warp_size)
        elif itemsize == 4 and self.problem.a.stride[-1] != 1:
            # From shared memory wgmma takes 32-bit operands along K alone (PTX ISA): this a goes through registers.
            total += config.block_m * config.block_k // threads
        for staged, block in zip(staging, (config.block_m, config.block_n), strict=True):
            block_bytes = block * config.block_k // threads * itemsize
            if not staged.asynchronous or config.stages == 1:
                # The block passes through registers; each separate access holds an address and a result that is packed later.
                total += block_bytes // 4 + 7 * block_bytes // staged.width // 4
            elif how == "warp_group" and staged.width < ALIGNED_BYTES:
                # Each of the many narrow copies holds its offset, and a part of the masks.
                total += 5 * block_bytes // staged.width // 4
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """How an operand reaches shared memory: by accesses of ``width`` bytes, past the registers or through them."""

    width: int
    asynchronous: bool


def _check_shape(problem: Problem, config: Config) -> str | None:
    if min(config.block_m, config.block_n, config.block_k) < LEAST_BLOCK:
        return f"tile {config.block_m}x{config.block_n}x{config.block_k}: each side must be at least {LEAST_BLOCK}"
    sides = (("m", config.block_m, problem.m, 1), ("n", config.block_n, problem.n, 1), ("k", config.block_k, problem.k, 2))
    for name, block, size, slack in sides:
        if block > slack * LEAST_BLOCK and block >= 2 * size:
            return f"block_{name} {block}: half of it or more hangs over {name} = {size}"
    tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n) * problem.batch
    if tiles >= INT32_LIMIT:
        return f"{tiles} tiles: the grid has fewer than 2^31 programs"
    return _check_split(problem, config, tiles)


def _check_split(problem: Problem, config: Config, tiles: int) -> str | None:
    if config.split_k == 1:
        return None
    blocks = -(-problem.k // config.block_k)
    if config.split_k > min(blocks, MOST_SPLITS):
        return f"split_k {config.split_k}: k = {problem.k} has {blocks} blocks of {config.block_k}"
    if -(-blocks // -(-blocks // config.split_k)) != config.split_k:
        return f"split_k {config.split_k}: {blocks} blocks of {config.block_k} leave a split without work"
    workspace = tiles * config.split_k * config.block_m * config.block_n * problem.accumulator.itemsize
    if workspace > MOST_WORKSPACE_BYTES:
        return f"split_k {config.split_k}: {workspace} bytes of partial sums, at most {MOST_WORKSPACE_BYTES}"
    return None


def _most_fma_elements(problem: Problem, config: Config) -> int:
    """Accumulators of one thread up to which an FMA kernel keeps its fragments in registers, found by compiling for every arch."""
    if config.block_k > 32:
        return 0
    if problem.dtype.itemsize == 2:
        return 512 // config.block_k
    return 64 if problem.dtype.itemsize == 4 else 32


def vector_bytes(operand: OperandClass, *, mask_divisor: int) -> int:
    """The widest access in bytes that addresses and mask along an operand's contiguous dimension allow, at least one element."""
    itemsize = operand.dtype.itemsize
    dim = operand.contiguous_dim
    if dim is None:
        return itemsize
    bounds = [operand.pointer_divisor, mask_divisor * itemsize]
    for i, stride in enumerate(operand.strides):
        if i != dim:
            bounds.append((divisor(stride.constant) if stride.constant is not None else stride.divisor) * itemsize)
    return max(min(bounds), itemsize)


def _mask_divisors(spec: KernelSpec) -> tuple[int, int]:
    """By how many elements the masks of a and b along their contiguous dimensions are aligned; 16 where there is no mask."""
    k = 16 if spec.even_k else divisor(spec.k.constant) if spec.k.constant is not None else spec.k.divisor
    m = divisor(spec.m.constant) if spec.m.constant is not None else spec.m.divisor
    n = divisor(spec.n.constant) if spec.n.constant is not None else spec.n.divisor
    return (k if spec.a.contiguous_dim == 2 else m, k if spec.b.contiguous_dim == 1 else n)


BASE_REGISTERS = 32
"""Addresses, masks and loop counters."""


def _fragment_registers(config: Config, itemsize: int, warp_size: int) -> int:
    """Registers of the operands' fragments that a warp of an mma holds at a time."""
    warps_m = min(config.warps, max(config.block_m // 16, 1))
    warps_n = max(config.warps // warps_m, 1)
    rows, cols = config.block_m // warps_m, max(config.block_n // warps_n, 8)
    return (rows + cols) * config.block_k * itemsize // 4 // warp_size
