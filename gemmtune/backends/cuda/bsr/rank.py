"""Time model that ranks the configs by the bottleneck of a tile, with an H200's constants, not yet fitted to this kernel."""

from __future__ import annotations

from ....device import DeviceInfo
from ....problem import Problem
from ..boxes import LINE
from ..hopper import clusters_at_a_time
from .configs import FRAGMENT, SHAPES, Config, tiles_of

LAUNCH_US, TILE_US = 3.5, 1.5
"""Minimum time of a launch, and the time of a tile's beginning and end."""
DRAM_GBPS, SM_GBPS, SHARED_GBPS = 3800.0, 60.0, 220.0
"""Bandwidths of memory, of L2 to one multiprocessor (x counts once per cluster), and of its shared memory."""
FLOPS_PER_NS = 2650.0
"""Throughput of one multiprocessor with warp products (mma)."""
STEP_NS, LATENCY_NS = 4.0, 500.0
"""Scheduler time of a step without blocks in one warp, and the latency of loading a fragment."""


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    """Return the model's time of a launch, in microseconds: the bottleneck of one tile, times the waves of tiles."""
    shape, sparsity = config.shape, problem.blocks
    density, block = max(sparsity.density, 0.005), sparsity.block_k
    x_bytes = 2.0 * problem.k * shape.block_n
    weight_bytes = 2.0 * density * problem.k * shape.rows
    fragments = weight_bytes / (2 * FRAGMENT**2)
    tile_ns = max(
        (x_bytes / shape.cluster + weight_bytes) / SM_GBPS,
        (x_bytes + fragments * 2 * FRAGMENT * shape.block_n * FRAGMENT / block) / SHARED_GBPS,
        weight_bytes * shape.block_n / FLOPS_PER_NS,
        fragments / shape.warps / shape.queue * LATENCY_NS,
        problem.k / LINE * shape.warps * STEP_NS,
    )
    rounds = -(-tiles_of(problem, shape) // clusters_at_a_time(device.sm_count, shape.cluster))
    moved = 2 * (density * problem.n + problem.m) * problem.k + problem.out.dtype.itemsize * problem.m * problem.n
    return LAUNCH_US + max(rounds * (TILE_US + tile_ns / 1e3), moved / DRAM_GBPS / 1e3)


def candidates(problem: Problem, device: DeviceInfo) -> list[Config]:
    """Return every shape, best first."""
    found = [Config(shape=shape, blocks=max(device.sm_count, shape.cluster), pdl=True) for shape in SHAPES]
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), str(config)))
