"""The model that ranks the configs, by what limits a tile.

Its constants are an H200's; those of a warp's chain are fitted to two kernels, of tiles of 64 and of 128 tokens.
"""

from __future__ import annotations

from ....device import DeviceInfo
from ....problem import Problem
from ..boxes import LINE
from ..hopper import clusters_at_a_time
from .configs import FRAGMENT, SHAPES, Config, Shape, tiles_of

LAUNCH_US, TILE_US = 3.5, 1.5
"""What a launch takes at the least, and the beginning and end of a tile."""
DRAM_GBPS, SM_GBPS, SHARED_GBPS = 3800.0, 60.0, 220.0
"""The rates of memory, of what one multiprocessor copies out of L2, counting x once for a cluster, and of its shared memory."""
FLOPS_PER_NS = 2650.0
"""The rate of one multiprocessor by products of single warps."""
STEP_NS, LATENCY_NS = 4.0, 500.0
"""What a warp takes of its scheduler for a step without blocks, and until a fragment that it asks for is there."""
CHAIN_STEP_NS, CHAIN_FRAGMENT_NS, CHAIN_TOKEN_NS = 60.0, 10.0, 1.9
"""How long a warp takes one after the other: for each step, for each fragment, and for each token that it multiplies this with."""


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    """The model's time of a launch, in microseconds: what limits one tile, times the rounds of tiles."""
    shape, sparsity = config.shape, problem.sparsity
    assert sparsity is not None
    density, block = max(sparsity.density, 0.005), sparsity.block_k
    x_bytes = 2.0 * problem.k * shape.block_n
    weight_bytes = 2.0 * density * problem.k * shape.rows
    fragments = weight_bytes / (2 * FRAGMENT**2)
    steps, each = problem.k / LINE, fragments / shape.warps
    tiles, at_a_time = tiles_of(problem, shape), clusters_at_a_time(device.sm_count, shape.cluster)
    together = min(shape.blocks_per_sm, -(-tiles // at_a_time))
    shared_ns = together * max(
        (x_bytes / shape.cluster + weight_bytes) / SM_GBPS,
        (x_bytes + fragments * 2 * FRAGMENT * shape.block_n * FRAGMENT / block) / SHARED_GBPS,
        weight_bytes * shape.block_n / FLOPS_PER_NS,
        steps * shape.warps * STEP_NS,
    )
    chain_ns = steps * CHAIN_STEP_NS + each * (CHAIN_FRAGMENT_NS + CHAIN_TOKEN_NS * shape.block_n)
    tile_ns = max(shared_ns, chain_ns, each / shape.queue * LATENCY_NS)
    rounds = -(-tiles // (at_a_time * together))
    moved = 2 * (density * problem.n + problem.m) * problem.k + problem.out.dtype.itemsize * problem.m * problem.n
    return LAUNCH_US + max(rounds * (TILE_US + tile_ns / 1e3), moved / DRAM_GBPS / 1e3)


def candidates(problem: Problem, device: DeviceInfo) -> list[Config]:
    """Every shape, best first."""
    found = [_told(shape, device) for shape in SHAPES]
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), str(config)))


def _told(shape: Shape, device: DeviceInfo) -> Config:
    return Config(shape=shape, blocks=max(device.sm_count * shape.blocks_per_sm, shape.cluster), pdl=True)
