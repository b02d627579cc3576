"""A cheap analytical model that orders operations before anything is compiled: compiling one takes half a minute.

The time of the slowest resource (products with whole waves counted, L2, memory), in the terms of DeepGEMM's and CUTLASS's
heuristics. It is there to order; its constants are rough.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ...device import DeviceInfo
from ...problem import Problem
from .operation import Operation
from .orientation import Oriented

__all__ = ["estimate_us", "select"]

SM_TFLOPS: dict[int, float] = {75: 1.6, 80: 2.9, 90: 6.6}
"""Of a multiprocessor's tensor cores with 16-bit operands at sustained clocks, by what an operation was written for."""
SIMT_SHARE = {"f32": 0.07, "f64": 0.035}
OPERAND_SHARE = {"f16": 1.0, "bf16": 1.0, "tf32": 0.5, "f64": 0.067, "s8": 2.0, "f32": 0.5}
L2_GBPS_PER_SM = 42.0
DRAM_GBPS: dict[int, float] = {75: 300.0, 80: 1900.0, 90: 4300.0}
LAUNCH_US = 2.5
TILE_US = 0.9
"""Filling the pipeline and storing a tile, where the next tile does not hide it."""
STREAM_K_US = 2.0
SLACK = 1.6
CP_ASYNC = 1.5
"""Copies of less than 16 bytes, each addressed by a thread, keep the tensor cores waiting."""
NARROW = 128
"""Columns of a tile below which the tensor cores wait for shared memory."""


def estimate_us(operation: Operation, oriented: Oriented, problem: Problem, device: DeviceInfo) -> float:
    """The model's time of one launch, in microseconds."""
    m, n, k = oriented.sizes
    tile_m, tile_n, tile_k = operation.tile
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n) * problem.batch
    cluster = operation.cluster[0] * operation.cluster[1]
    usable = device.sm_count // cluster * cluster
    waves = tiles / usable
    steps = math.ceil(k / tile_k)
    tile_us = 2.0 * tile_m * tile_n * tile_k * steps / (_rate(operation) * 1e6)
    overlapped = "Pingpong" in operation.kernel_schedule or operation.stream_k
    whole = max(waves, min(1.0, steps / 4) / 4) if operation.stream_k else math.ceil(waves)
    compute = whole * (tile_us + TILE_US * (0.4 if overlapped else 1.0)) + (STREAM_K_US if operation.stream_k else 0.0)
    itemsize = problem.dtype.itemsize
    busy = usable if operation.stream_k else min(tiles, usable)
    shared = operation.cluster
    traffic = tiles * k * itemsize * (tile_m / shared[1] + tile_n / shared[0]) + problem.out.numel * itemsize
    l2_us = traffic / (L2_GBPS_PER_SM * busy * 1e3)
    dram_us = problem.bytes / (DRAM_GBPS.get(device.capability, 2000.0) * min(1.0, busy / (0.5 * device.sm_count)) * 1e3)
    if "CpAsync" in operation.kernel_schedule:
        compute *= CP_ASYNC
    return LAUNCH_US + math.pow(compute**4 + l2_us**4 + dram_us**4, 0.25)


def _rate(operation: Operation) -> float:
    """TFLOP/s of one multiprocessor."""
    newest = max(cc for cc in SM_TFLOPS if cc <= max(operation.introduced, 75))
    share = SIMT_SHARE[operation.a] if operation.opcode == "Simt" else OPERAND_SHARE[operation.a]
    tile_m, tile_n, _ = operation.tile
    narrow = min(1.0, 0.25 + 0.75 * min(tile_n, NARROW) / NARROW) * (0.8 if tile_m < NARROW else 1.0)
    return SM_TFLOPS[newest] * share * (narrow if operation.opcode == "TensorOp" else 1.0)


def select(timed: Sequence[tuple[float, Operation]], count: int | None) -> list[Operation]:
    """The ``count`` operations with the least times, spread over different tiles and schedules; all, best first, for None.

    Those that the model holds for more than SLACK times slower than the best are left out of a limited search.
    """
    ordered = sorted(
        timed, key=lambda item: (item[0], not item[1].tma_store, -item[1].alignment_a - item[1].alignment_b, item[1].name)
    )
    if count is None:
        return [op for _, op in ordered]
    near = [op for time_us, op in ordered if time_us <= SLACK * ordered[0][0]]
    chosen: list[Operation] = []
    tiles: Counter[tuple[int, ...]] = Counter()
    kinds: Counter[tuple[object, ...]] = Counter()
    for most in range(1, len(near) + 1):
        for op in near:
            kind = (op.tile, op.kernel_schedule, op.scheduler)
            if len(chosen) == count:
                return chosen
            if op not in chosen and tiles[op.tile] < 2 * most and kinds[kind] < most:
                chosen.append(op)
                tiles[op.tile] += 1
                kinds[kind] += 1
    return chosen
