"""Which configs the persistent template has for a problem, which of them are legal, and which come first."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ....device import DeviceInfo
from ....problem import Problem
from ....problem.layout import ALIGNED_BYTES
from ....problem.rules import why_not_dense
from ..arch import arch_of, can_overlap
from ..classes import INT32_LIMIT
from ..configs import Config
from ..descriptors import describable
from ..geometry import geometry
from ..legality import Predicate, Resources, why_too_large
from ..rank import BLOCK_OVERHEAD_BYTES, LATENCY_US, LAUNCH_US, STORE_US, loop_step_us

__all__ = [
    "halved",
    "persistent_configs",
    "persistent_resources",
    "programs_of",
    "stores_described",
    "why_not_config",
    "why_not_persistent",
]

TILES = (
    (128, 256, 64, 8),
    (256, 128, 64, 8),
    (128, 128, 64, 8),
    (128, 128, 64, 4),
    (128, 128, 128, 8),
    (64, 256, 64, 4),
    (64, 128, 128, 4),
    (128, 64, 128, 4),
    (64, 128, 64, 4),
    (128, 64, 64, 4),
    (64, 64, 128, 4),
)
"""(block_m, block_n, block_k, warps)."""
FEWEST_STAGES, MOST_STAGES = 3, 6
MOST_RESIDENT = 2
HALVED_ELEMENTS = 128 * 256
"""From this size on a tile is stored in two halves."""
LEAST_SHARE = 3
"""With fewer tiles than a third of the multiprocessors, what is summed has to be split, which this template does not do."""
SLACK = 1.6
"""By how much a config may be slower than the best one by the model."""
SHORT_US = 30.0
"""Up to here a launch starts as one that may overlap the kernel before it: the gain is about a microsecond."""
SUSTAINED = 0.82
"""Of the matrix units' rate, what large tiles keep up at the clocks that a loaded GPU has."""
BARRIER_BYTES = 16
"""Of one stage, where each operand has a barrier."""
BASE_REGISTERS = 40


def persistent_configs(problem: Problem, device: DeviceInfo) -> tuple[Config, ...]:
    """The legal configs, the best by the model first."""
    return tuple(config for _, config in _timed(problem, device))


@functools.lru_cache(maxsize=1024)
def _timed(problem: Problem, device: DeviceInfo) -> tuple[tuple[float, Config], ...]:
    if why_not_persistent(problem, device) is not None:
        return ()
    predicate = Predicate(problem, device)
    legal = [config for config in _pool(problem, device) if why_not_config(problem, device, config) is None]
    timed = sorted(
        ((_estimate_us(predicate, config), -config.stages, str(config), config) for config in legal), key=lambda item: item[:3]
    )
    overlaps = can_overlap(device.capability)
    return tuple(
        (time_us, replace(config, pdl=overlaps and time_us < SHORT_US))
        for time_us, _, _, config in timed
        if time_us <= SLACK * timed[0][0]
    )


def _pool(problem: Problem, device: DeviceInfo) -> Iterator[Config]:
    """Each tile with the most stages that fit for one program on a multiprocessor, and for two."""
    for block_m, block_n, block_k, warps in TILES:
        depths = []
        for resident in range(1, MOST_RESIDENT + 1):
            room = min(device.smem_per_block_bytes, device.smem_per_sm_bytes // resident - BLOCK_OVERHEAD_BYTES)
            for stages in range(MOST_STAGES, FEWEST_STAGES - 1, -1):
                config = Config(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, warps=warps)
                if persistent_resources(problem, device, config).smem_bytes <= room:
                    depths.append(config)
                    break
        yield from dict.fromkeys(depths)


def why_not_persistent(problem: Problem, device: DeviceInfo) -> str | None:
    """Why the template has nothing for the problem on this device, or None. Assumes that ``check_problem`` found nothing."""
    reason = why_not_dense(problem)
    if reason is not None:
        return reason
    if device.type != "cpu" and (device.type != "cuda" or not arch_of(device).warp_group):
        return f"{device.arch}: no copy engine that feeds a warp group"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"{problem.dtype_label}: operands of 16 bits are served"
    if problem.batched:
        return f"{problem.op}: one product is served, not a batch"
    if problem.alpha == "zero" or problem.k == 0:
        return "nothing is multiplied"
    for name, layout in (("a", problem.a), ("b", problem.b)):
        if not describable(layout):
            return f"{name} {layout}: rows or columns must be contiguous, and begin at multiples of {ALIGNED_BYTES} bytes"
    return None


def stores_described(problem: Problem) -> bool:
    """Is the result stored through a descriptor?"""
    return problem.out.stride[-1] == 1 and describable(problem.out) and problem.out.dtype.itemsize >= 2


def halved(config: Config) -> bool:
    """Is a tile stored in two halves?"""
    return config.block_m * config.block_n >= HALVED_ELEMENTS


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem that the template can serve, or None."""
    for name, block, size in (("m", config.block_m, problem.m), ("n", config.block_n, problem.n), ("k", config.block_k, problem.k)):
        if block >= 2 * size:
            return f"block_{name} {block}: half of it or more hangs over {name} = {size}"
    if config.split_k > 1:
        return f"split_k {config.split_k}: the template does not split"
    tiles = geometry(problem, config).tiles
    if tiles >= INT32_LIMIT // 2:
        return f"{tiles} tiles: their numbers do not fit 32 bits"
    if device.type == "cpu":
        return None
    if tiles < device.sm_count // LEAST_SHARE:
        return f"{tiles} tiles: too few for {device.sm_count} multiprocessors"
    return why_too_large(persistent_resources(problem, device, config), device)


def persistent_resources(problem: Problem, device: DeviceInfo, config: Config) -> Resources:
    """An upper bound of the shared memory: all stages, a tile on its way out or what is added to it on its way to the layout of the
    sum, and barriers; and an estimate of the registers of one thread."""
    stages = config.stages * ((config.block_m + config.block_n) * config.block_k * problem.dtype.itemsize + BARRIER_BYTES)
    whole = config.block_m * config.block_n
    stored = whole // 2 if halved(config) else whole
    reads = _reads_tiles(problem)
    tile_bytes = stored * max(problem.out.dtype.itemsize, problem.accumulator.itemsize if reads else 0)
    registers = BASE_REGISTERS + (whole + (stored if reads else 0)) // (32 * config.warps)
    return Resources(smem_bytes=stages + tile_bytes + arch_of(device).barrier_bytes, registers=registers)


def _reads_tiles(problem: Problem) -> bool:
    """Does the epilogue read an operand that has a row and a column of its own for each element?"""
    layouts = [*([problem.inp_read] if problem.inp_read is not None else [])]
    layouts += problem.epilogue.operands if problem.epilogue else ()
    return any(0 not in layout.expanded((problem.m, problem.n)).stride for layout in layouts)


def programs_of(problem: Problem, device: DeviceInfo, config: Config) -> int:
    """Programs that are launched: all tiles, or as many as are resident."""
    return min(geometry(problem, config).tiles, max(device.sm_count, 1) * _resident(problem, device, config))


def _resident(problem: Problem, device: DeviceInfo, config: Config) -> int:
    need = persistent_resources(problem, device, config)
    by_smem = device.smem_per_sm_bytes // (need.smem_bytes + BLOCK_OVERHEAD_BYTES)
    by_registers = device.registers_per_sm // max(need.registers * config.warps * max(device.warp_size, 1), 1)
    return max(min(by_smem, by_registers, MOST_RESIDENT), 1)


def _estimate_us(predicate: Predicate, config: Config) -> float:
    """Waves of tiles: each multiprocessor works off its tiles one after the other, or memory is what takes the time."""
    problem, device = predicate.problem, predicate.device
    tiles = math.ceil(geometry(problem, config).tiles / device.sm_count)
    steps = -(-problem.k // config.block_k)
    tile_us = steps * loop_step_us(predicate, config, sustained=SUSTAINED) + STORE_US * config.block_m * config.block_n / 16384
    memory_us = 1e-3 * predicate.least_bytes / (predicate.arch.dram_gbps * device.sm_count)
    return LAUNCH_US + LATENCY_US + max(tiles * tile_us, memory_us)
