"""Legality predicate, before anything is compiled. Its shared memory is an upper bound close to that of Triton's pipeliner."""

import functools
from collections.abc import Iterable

import torch

from ...device import DeviceInfo
from ...problem import Problem
from ...problem.layout import ALIGNED_BYTES
from ...problem.rules import why_not_fnuz
from .arch import arch_of
from .classes import INT32_LIMIT, IntClass, OperandClass, shaped
from .configs import BASE_REGISTERS, Config, Resources, blocks_along_k, fragment_registers, most_fma_elements, tiles_of
from .hip import Read, hip_registers, why_not_on_hip, why_too_many_registers
from .quantized import NARROW_SUM, per_byte, product_dtype, quantized_of, rounds_weights
from .spec import Staging, specialise, staging_of

MOST_SPLITS = 65535
MOST_WORKSPACE_BYTES = 256 * 2**20
LEAST_BLOCK = 16
"""Minimum side of a tile that ``tl.dot`` accepts on every target."""
WARP_GROUP_ROWS = 64
"""Minimum rows of a tile that a warp group multiplies."""
MOST_THREADS = 1024
LEAST_ROW_BYTES = 64
LEAST_BLOCK_K_OF_BYTES = 32
"""Elements along K that one instruction multiplies for 8-bit operands."""
TENSOR_MEMORY = 100
"""Compute capability from which tcgen05 multiplies for a warp group."""
PADDING = 9 / 8
LEAST_MIXED = 80
"""Minimum compute capability for mixed operands, the same limit as in PyTorch's Inductor."""


def why_overhanging(problem: Problem, config: Config, sides: Iterable[str]) -> str | None:
    """Return why a block is too large for one of ``sides`` (m, n, k) of the problem, or None."""
    for side in sides:
        block, size = getattr(config, f"block_{side}"), getattr(problem, side)
        if block >= 2 * size:
            return f"block_{side} {block}: half of it or more hangs over {side} = {size}"
    return None


def check_problem(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why no config can serve the problem on this device, or None."""
    if problem.widens_b:
        if device.type == "cuda" and device.capability < LEAST_MIXED:
            return f"{device.arch}: mixed_mm is served from sm{LEAST_MIXED}"
        if problem.dtype != torch.float32 and not any(
            n <= 1 or s == 1 for n, s in zip(problem.b.size, problem.b.stride, strict=True)
        ):
            return f"b has strides {list(problem.b.stride)}: neither its rows nor its columns are contiguous"
    if problem.empty:
        return "the result has no elements: nothing is launched"
    if problem.precision.input_mode not in ("ieee", "tf32"):
        return f"input mode {problem.precision.input_mode}: expected ieee or tf32"
    if problem.c is not None and problem.batched:
        return "a sum of two products in a batch: only single ones are served"
    if problem.c is not None and 0 in problem.summed:
        return "one of the products has no terms: compute the other one with mm"
    if max(problem.m, problem.n, *problem.summed, problem.batch) >= INT32_LIMIT:
        return "a size does not fit 32 bits"
    if device.type == "cuda" and device.capability < 75:
        return f"{device.arch}: Triton compiles for sm75 and newer"
    return None if arch_of(device).fnuz else why_not_fnuz(problem)


class Predicate:
    """Legality and resources of configs for one problem, which ``check_problem`` accepts, on one device."""

    dots = 1
    """Products of blocks in one step of the loop."""
    parts = 1
    """Parts into which each operand is split."""

    def __init__(self, problem: Problem, device: DeviceInfo) -> None:
        self.problem = problem
        self.split_problem = problem
        """Problem whose K is split; a subclass may check the other rules with a different problem."""
        self.device = device
        self.arch = arch_of(device)
        self.least_bytes = problem.bytes
        self.product = product_dtype(problem, device.capability)
        self.number_bytes = (problem.a.dtype.itemsize, problem.b.dtype.itemsize / per_byte(problem))
        """Bytes of one number of a and of b in memory."""
        self.scales_weights = rounds_weights(problem) is not None
        self.quantized = quantized_of(problem, NARROW_SUM, capability=device.capability)
        self._staging: dict[int, tuple[Staging, Staging]] = {}

    def check(self, config: Config) -> str | None:
        device = self.device
        reason = _check_shape(self.problem, config) or self.check_split(config) or self.check_scales(config)
        if reason or device.type == "cpu":
            return reason
        reason = why_not_on_hip(config, self.product, tf32=self.arch.tf32 and self.problem.precision.input_mode == "tf32")
        if reason is not None:
            return reason
        threads = config.warps * device.warp_size
        if threads > MOST_THREADS:
            return f"{config.warps} warps of {device.warp_size}: more than {MOST_THREADS} threads"
        if self.instruction(config) != "fma" and config.block_k * self.product.itemsize < LEAST_ROW_BYTES:
            return f"block_k {config.block_k}: rows of less than {LEAST_ROW_BYTES} bytes starve a tensor core"
        # Triton uses tcgen05 (tf32) for float32 despite "ieee" if an operand comes from a narrower type.
        ieee = self.product == torch.float32 and self.problem.precision.input_mode == "ieee" and self._rewritten(1, "fma")
        tensor_memory = device.capability >= TENSOR_MEMORY and self.arch.warp_group
        if tensor_memory and ieee and config.block_m >= 64 and config.warps % 4 == 0:
            tile = f"{config.block_m}x{config.block_n}"
            return f"tile {tile}, {config.warps} warps: float32 would be multiplied as tf32 on {device.arch}"
        if self.instruction(config) == "fma":
            most = most_fma_elements(self.problem, config)
            if config.block_m * config.block_n > most * threads:
                return f"registers: FMA kernels for {self.problem.dtype_label} keep at most {most} accumulators per thread"
        if config.stages > 1 and not any(staged.asynchronous for staged in self.staging(config)):
            return f"stages {config.stages}: neither operand can be copied asynchronously, so stages have no effect"
        return self.why_no_room(config)

    def why_no_room(self, config: Config) -> str | None:
        """Return why the device lacks shared memory or registers for a config, or None."""
        need = self.resources(config)
        spilling = why_too_many_registers(need.registers, config) if self.device.type == "hip" else None
        return spilling or need.why_not_on(self.device)

    def check_scales(self, config: Config) -> str | None:
        """Return why the config does not fit the problem's scales or its sums of 8-bit floats, or None."""
        quantized = self.quantized
        if quantized is None:
            return None
        for scale in quantized.scales:
            if scale.along_k and scale.block[scale.k_dim] % config.block_k:
                return (
                    f"block_k {config.block_k}: does not divide the {scale.block[scale.k_dim]} elements that share one {scale.name}"
                )
        if (quantized.fresh or quantized.imprecise) and config.block_k > NARROW_SUM:
            return f"block_k {config.block_k}: sums of 8-bit floats are narrow and take at most {NARROW_SUM} terms"
        if self.product.itemsize == 1 and config.block_k < LEAST_BLOCK_K_OF_BYTES:
            return f"block_k {config.block_k}: 8-bit products need at least {LEAST_BLOCK_K_OF_BYTES}"
        return None

    def check_split(self, config: Config) -> str | None:
        """Return why K cannot be split this way, or None. This completes ``check``, because splits change no resource."""
        problem = self.split_problem
        if config.split_k == 1:
            return None
        blocks = blocks_along_k(problem, config.block_k)
        if config.split_k > min(blocks, MOST_SPLITS):
            return f"split_k {config.split_k}: k = {'+'.join(map(str, problem.summed))} has {blocks} blocks of {config.block_k}"
        if -(-blocks // -(-blocks // config.split_k)) != config.split_k:
            return f"split_k {config.split_k}: {blocks} blocks of {config.block_k} leave a split without work"
        workspace = tiles_of(problem, config) * config.split_k * config.block_m * config.block_n * problem.accumulator.itemsize
        if workspace > MOST_WORKSPACE_BYTES:
            return f"split_k {config.split_k}: {workspace} bytes of partial sums, at most {MOST_WORKSPACE_BYTES}"
        return None

    def instruction(self, config: Config) -> str:
        """Return the instruction that multiplies: ``fma``, ``mma`` (one warp) or ``warp_group`` (wgmma, tcgen05)."""
        arch, dtype = self.arch, self.product
        if dtype == torch.float64:
            return "mma" if arch.fp64_tensor_core else "fma"
        if self.device.type == "hip":  # HIP matrix instructions take float32 without rounding
            return "mma"
        if not arch.tensor_core or (dtype == torch.float32 and self.problem.precision.input_mode == "ieee"):
            return "fma"
        # Triton supports no integer form of tcgen05.
        grouped = arch.warp_group and not (dtype == torch.int8 and self.device.capability >= TENSOR_MEMORY)
        return "warp_group" if grouped and config.block_m >= WARP_GROUP_ROWS and config.warps % 4 == 0 else "mma"

    def resources(self, config: Config) -> Resources:
        """Return an upper bound of the shared memory and an estimate of the registers."""
        staging, how = self.staging(config), self.instruction(config)
        return Resources(smem_bytes=self._smem_bytes(config, how, staging), registers=self._registers(config, how, staging))

    def staging(self, config: Config) -> tuple[Staging, Staging]:
        staging = self._staging.get(config.block_k)
        if staging is None:
            spec = specialise(self.problem, config, capability=self.device.capability)
            always = self.device.type == "hip"
            staging = self._staging[config.block_k] = staging_of(spec, async_copy=self.arch.async_copy, always=always)
        return staging

    def _smem_bytes(self, config: Config, how: str, staging: tuple[Staging, Staging]) -> int:
        problem, arch = self.problem, self.arch
        acc_bytes = problem.accumulator.itemsize
        buffers = config.stages if how == "warp_group" else max(config.stages - 1, 1)
        waiting = min(arch.sync_buffers, config.stages) if how == "warp_group" else 1
        sizes = 0.0
        for i, (staged, block) in enumerate(zip(staging, (config.block_m, config.block_n), strict=True)):
            # Triton widens 16-bit operands of an FMA to the accumulator's type.
            rewritten = self._rewritten(i, how)
            itemsize = max(self.number_bytes[i], acc_bytes) if how == "fma" and not rewritten else self.number_bytes[i]
            sizes += block * config.block_k * itemsize * (buffers if staged.asynchronous else waiting)
            if rewritten:
                sizes += block * config.block_k * self.product.itemsize * arch.sync_buffers
        if how == "fma" and self._rewritten(1, how):
            # Both operands become float32 and go through padded memory to the multiplication's layout.
            sizes += (config.block_m + config.block_n) * config.block_k * 4 * PADDING
        # Converting the tile from the accumulator's layout to the store's layout reuses the stages' memory.
        converted = config.block_m * config.block_n * max(acc_bytes, problem.out.dtype.itemsize)
        # Each scale may be converted from the layout of its load to the layout of the sum.
        scales = len(problem.scales) * (config.block_m + config.block_n) * 4
        if self.device.type == "hip" and how != "fma":
            converted = 0  # sums are stored in the layout of the matrix instruction
        return max(int(sizes) + scales, converted) + arch.barrier_bytes

    def _rewritten(self, operand: int, how: str) -> bool:
        """Return True if operand 0 (a) or 1 (b) returns to shared memory after conversion or transposition in registers."""
        layout, stored = ((self.problem.a, self.problem.b)[operand], self.number_bytes[operand])
        if stored != self.product.itemsize or (operand and self.problem.widens_b):
            return True
        # Matrix units read 8-bit operands only along K (PTX ISA).
        return self.product.itemsize == 1 and how != "fma" and layout.stride[-1 if operand == 0 else -2] != 1

    def _registers(self, config: Config, how: str, staging: tuple[Staging, Staging]) -> int:
        if self.device.type == "hip":
            return self._hip_registers(config, how, staging)
        threads = config.warps * self.device.warp_size
        itemsize = self.product.itemsize
        sums = config.block_m * config.block_n * self.problem.accumulator.itemsize // 4 // threads
        total = BASE_REGISTERS + sums
        if how == "fma":
            rewritten = config.block_m * self._rewritten(0, how) + config.block_n * self._rewritten(1, how)
            return total + config.block_k * rewritten // threads
        total += self.step_registers(config, how, sums)
        if how == "mma":
            total += fragment_registers(config, itemsize, self.device.warp_size)
        elif itemsize == 4 and self.problem.a.stride[-1] != 1:
            # wgmma reads 32-bit operands from shared memory only along K (PTX ISA): this a passes through registers.
            total += config.block_m * config.block_k // threads
        for i, (staged, block) in enumerate(zip(staging, (config.block_m, config.block_n), strict=True)):
            block_bytes = int(block * config.block_k // threads * self.number_bytes[i])
            if self._rewritten(i, how):
                # Weights with their own scales or zero points are temporarily float32.
                total += block * config.block_k // threads * (4 if i and self.scales_weights else itemsize) // 4
            if not staged.asynchronous or config.stages == 1:
                # The block passes through registers. Each access holds an address, and a result that is packed later.
                total += block_bytes // 4 + 7 * block_bytes // staged.width // 4
            elif how == "warp_group" and staged.width < ALIGNED_BYTES:
                # Each narrow copy holds its offset and a part of the masks.
                total += 5 * block_bytes // staged.width // 4
        return total

    def step_registers(self, config: Config, how: str, sums: int) -> int:
        """Return the registers for the sum of one step. A warp group that promotes its own sums holds 64 rows of them at a time."""
        if self.quantized is not None and self.quantized.fresh:
            return sums
        if self.quantized is not None and self.quantized.imprecise is not None and how == "warp_group":
            return sums // max(config.block_m // (16 * config.warps), 1)
        return 0

    def _hip_registers(self, config: Config, how: str, staging: tuple[Staging, Staging]) -> int:
        problem, reads = self.problem, []
        for i, (block, layout, dim) in enumerate(((config.block_m, problem.a, -1), (config.block_n, problem.b, -2))):
            along_k, width = layout.stride[dim] == 1, staging[i].width
            size, converted = self.number_bytes[i], self._rewritten(i, how)
            reads.append(Read(block=block, along_k=along_k, number_bytes=size, width=width, converted=converted))
        fresh = self.quantized is not None and self.quantized.fresh
        return hip_registers(
            problem,
            config,
            self.product.itemsize,
            (reads[0], reads[1]),
            fresh=bool(fresh),
            transposes=self.arch.register_transpose,
            store_bytes=self._store_bytes,
        )

    @functools.cached_property
    def _store_bytes(self) -> int:
        """Width in bytes of accesses to the result; a matrix instruction leaves neighbours of a row in one thread."""
        layout, shape = shaped(self.problem)["out"]
        out = OperandClass.of(layout, shape)
        if out.contiguous_dim != 2:
            return out.dtype.itemsize
        return out.vector_bytes(IntClass.of(self.problem.n).alignment)


def _check_shape(problem: Problem, config: Config) -> str | None:
    if min(config.block_m, config.block_n, config.block_k) < LEAST_BLOCK:
        return f"tile {config.block_m}x{config.block_n}x{config.block_k}: each side must be at least {LEAST_BLOCK}"
    blocks = {"m": config.block_m, "n": config.block_n, "k": config.block_k // 2}
    if problem.float8 and config.block_m == WARP_GROUP_ROWS and config.warps % 4 == 0:
        del blocks[
            "m"
        ]  # other instructions widen 8-bit floats: few rows have the bits that they have among many by this tile alone
    reason = why_overhanging(problem, config, [side for side, block in blocks.items() if block > LEAST_BLOCK])
    if reason is not None:
        return reason
    tiles = tiles_of(problem, config)
    return f"{tiles} tiles: the grid has fewer than 2^31 programs" if tiles >= INT32_LIMIT else None
