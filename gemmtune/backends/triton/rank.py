"""Analytical model that orders configs cheaply, so that a search of 24 contains the suitable ones.

The estimate is the time of the slowest resource: memory (limited by the copies in flight that hide latency), L2, shared memory, or
the multiply units in whole waves of programs. The terms are those of DeepGEMM's and CUTLASS' heuristics. The model only has to
order configs, so its constants are rough.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from .configs import Config, Resources, geometry, tiles_of
from .legality import Predicate

LATENCY_US = 0.8
"""Microseconds from issuing a copy to its arrival, with memory under load."""
LAUNCH_US = 2.0
BLOCK_OVERHEAD_BYTES = 1024
"""Shared memory that the system reserves in each block."""
MOST_BLOCKS_PER_SM = 32
SM_GBPS = 110.0
"""L2 bandwidth that one multiprocessor can draw."""
SYNC_STEP_US = 0.6
"""Extra time of a loop step that loads, waits and only then multiplies."""
STEP_US = 0.02
"""Barriers and address arithmetic of one loop step."""
SPLIT_US = 1.2
"""Time to write a partial sum, signal arrival and wait, without the traffic."""


def estimate_us(predicate: Predicate, config: Config, need: Resources) -> float:
    """Return the modelled time of one launch in microseconds; ``need`` is ``predicate.resources(config)``."""
    problem, device, arch = predicate.problem, predicate.device, predicate.arch
    tiles = tiles_of(problem, config)
    programs = tiles * config.split_k
    threads = config.warps * device.warp_size
    by_smem = device.smem_per_sm_bytes // (need.smem_bytes + BLOCK_OVERHEAD_BYTES)
    by_registers = device.registers_per_sm // (max(min(need.registers, arch.registers_per_thread), 40) * threads)
    blocks_per_sm = max(min(by_smem, by_registers, arch.threads_per_sm // threads, MOST_BLOCKS_PER_SM), 1)
    resident = min(max(programs / device.sm_count, 1.0), blocks_per_sm)
    waves = math.ceil(programs / (device.sm_count * blocks_per_sm))
    steps = -(-problem.k // (config.block_k * config.split_k))
    busy_us, store_us = loop_step_us(predicate, config), STORE_US * config.block_m * config.block_n / 16384
    # A step takes as long as its products, or as the copies that it waits for. Other resident programs partly hide that wait.
    asynchronous = config.stages > 1 and any(staged.asynchronous for staged in predicate.staging(config))
    wait_us = LATENCY_US / (config.stages - 1) if asynchronous else SYNC_STEP_US + busy_us
    step_us = _smooth_max(busy_us, wait_us / resident)
    multiply = math.ceil(programs / device.sm_count) * (steps * step_us + store_us)
    memory = _memory_us(predicate, config, resident=resident, tiles=tiles)
    return LAUNCH_US + _smooth_max(multiply, memory) + waves * LATENCY_US + _reduction_us(predicate, config)


def _reduction_us(predicate: Predicate, config: Config) -> float:
    """Return the time after the last product: programs add up the splits of each group, then the groups."""
    if config.split_k == 1:
        return 0.0
    where = geometry(predicate.problem, config)
    levels = (where.splits_per_group, where.groups) if where.groups > 1 else (where.splits,)
    tile_bytes = config.block_m * config.block_n * predicate.problem.accumulator.itemsize
    return sum(SPLIT_US + 1e-3 * count * tile_bytes / SM_GBPS for count in levels)


def _smooth_max(x: float, y: float) -> float:
    """Return a value near the larger one, and above it if both are close: two resources never overlap perfectly."""
    return float((x**4 + y**4) ** 0.25)


def loop_step_us(predicate: Predicate, config: Config, *, sustained: float = 1.0) -> float:
    """Return the time of one loop step's products on an otherwise idle multiprocessor, at a ``sustained`` share of the peak."""
    arch, how = predicate.arch, predicate.instruction(config)
    itemsize = predicate.product.itemsize
    flops = 2.0 * config.block_m * config.block_n * config.block_k * predicate.dots
    if how == "fma":
        rate = arch.fma_tflops * (0.5 if itemsize == 8 else 0.7)
    else:
        rate = arch.tensor_tflops * {8: 1 / 15, 4: 0.5, 2: 1.0, 1: 2.0}[itemsize]
        if arch.warp_group and how == "mma":
            rate *= 0.55
    rate *= sustained * {1: 0.5, 2: 0.75}.get(config.warps, 1.0)
    # Each block is written to shared memory once and read by the multiply. A warp group reads at least 64 rows.
    fed_rows = max(config.block_m, 64) if how == "warp_group" else config.block_m
    rows = config.block_m + config.block_n + (fed_rows + config.block_n) * (1 if how == "warp_group" else 2)
    return max(flops / rate * 1e-6, rows * config.block_k * itemsize * predicate.parts / SMEM_BYTES_PER_US) + STEP_US


SMEM_BYTES_PER_US = 225_000.0
"""Shared-memory bandwidth of one multiprocessor: 128 bytes per clock."""
STORE_US = 0.5
"""Time to write a tile of 128 × 128."""


def _memory_us(predicate: Predicate, config: Config, *, resident: float, tiles: int) -> float:
    """Return the time of the traffic, limited by the copies in flight. Memory moves distinct bytes once, L2 those of all tiles."""
    problem, device, arch = predicate.problem, predicate.device, predicate.arch
    a_bytes, b_bytes = predicate.number_bytes
    row_pair_bytes = config.block_m * a_bytes + config.block_n * b_bytes
    active = min(tiles * config.split_k, device.sm_count)
    stage_bytes = row_pair_bytes * config.block_k
    in_flight_bytes = active * resident * max(config.stages - 1, 1) * stage_bytes
    reach_gbps = min(in_flight_bytes / LATENCY_US * 1e-3, active * SM_GBPS)
    partials = 2.0 * tiles * config.split_k * config.block_m * config.block_n * problem.accumulator.itemsize
    traffic = tiles * problem.k * row_pair_bytes + (partials if config.split_k > 1 else 0.0)
    # Rows shorter than a cache line of 128 bytes waste part of each transfer.
    row_bytes = config.block_k * min(a_bytes, b_bytes)
    reach_gbps *= 1.0 if row_bytes >= 128 else 0.9 if row_bytes >= 64 else 0.7
    dram_us, l2_us, reach_us = (
        1e-3 * count / gbps
        for count, gbps in (
            (predicate.least_bytes, arch.dram_gbps * device.sm_count),
            (traffic, arch.l2_gbps * device.sm_count),
            (max(predicate.least_bytes, traffic), reach_gbps),
        )
    )
    return _smooth_max(max(dram_us, l2_us), reach_us)


AnyConfig = TypeVar("AnyConfig", bound=Config)


def ranked(timed: Iterable[tuple[float, AnyConfig]]) -> list[tuple[float, AnyConfig]]:
    """Return (time, config) pairs sorted by time, then by name."""
    return sorted(timed, key=lambda item: (item[0], str(item[1])))


def select(predicate: Predicate, legal: Sequence[tuple[Config, Resources]], count: int | None) -> list[Config]:
    """Return the ``count`` best configs by the model, spread over different tiles; None returns all, best first.

    The model's error exceeds the difference between neighbouring configs. So each tile gets few places, and each tile with one
    number of splits fewer, until the other tiles have theirs.
    """
    timed = ranked((estimate_us(predicate, config, need), config) for config, need in legal)
    if count is None:
        return [config for _, config in timed]
    chosen: list[Config] = []
    tiles: Counter[tuple[int, int]] = Counter()
    shapes: Counter[tuple[int, ...]] = Counter()
    for round_, slack in enumerate(SLACKS, start=1):
        for time_us, config in timed:
            if len(chosen) == count or time_us > slack * timed[0][0]:
                break
            shape = (*config.tile, config.block_k, config.split_k)
            if config not in chosen and tiles[config.tile] < 2 * round_ and shapes[shape] < round_:
                chosen.append(config)
                tiles[config.tile] += 1
                shapes[shape] += 1
    # Another group_m costs a measurement but no compilation.
    large = [config for config in chosen if -(-predicate.problem.m // config.block_m) >= LEAST_ROWS_TO_REGROUP]
    regrouped = [replace(config, group_m=group_m) for config in large for group_m in OTHER_GROUPS]
    return chosen + regrouped[: max(count - len(chosen), 0)]


SLACKS = (1.25, 1.5, 1.8)
"""Largest ratio to the best modelled time, for the first round and each later one."""
OTHER_GROUPS = (16, 4)
LEAST_ROWS_TO_REGROUP = 8
