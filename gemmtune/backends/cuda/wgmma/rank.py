"""Which configs are tried for a problem, best first: a model of what a multiprocessor multiplies and reads.

Its constants are those of an H200; for other GPUs they are as good for an order.
"""

from __future__ import annotations

from ....device import DeviceInfo
from ....problem import Problem
from ..hopper import clusters_at_a_time
from ..mixed.weights import weights_of
from .configs import SHAPES, Config
from .legality import steps_of, tiles_of

__all__ = ["CLUSTER_SIZES", "candidates", "estimate_us", "why_not_likely"]

CLUSTER_SIZES = (1, 2, 3, 4)
"""The blocks of a cluster that divide K: more would add up longer than they multiply."""
LAUNCH_US = {1: 3.5, 2: 2.5}
"""By the blocks that have room on a multiprocessor: with two, one of the next launch begins before one of the last has ended."""
WIDEN_NS, ROW_NS = 15.6, 0.3
"""What a product of 64 columns and 16 along K takes: once, and for each row."""
ALONE = 1.9
"""Times as long, where a multiprocessor has one group of warps: nothing is multiplied while it widens."""
DRAM_GBPS = 3800.0
"""The rate at which b and a are read, once."""
TILE_US, TILE_GBPS = 1.0, 50.0
"""What the end of a tile takes, and the rate at which each block of a cluster sends its sums."""
LEAST_ROWS = {"quick": 33, "default": 33, "exhaustive": 1}
"""The rows of a from which on it is tried: with fewer, the skinny kernels do no more than has to be done."""


def why_not_likely(problem: Problem, _device: DeviceInfo, search: str) -> str | None:
    """Why the kernel is not tried in such a search, or None."""
    least = LEAST_ROWS[search]
    return f"a has {problem.m} rows, tried from {least} on" if problem.m < least else None


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    """The model's time of one launch, in microseconds."""
    shape, blocks = config.shape, config.cluster_k
    rows, cols = tiles_of(problem, config)
    at_a_time = clusters_at_a_time(device.sm_count, blocks)
    each = -(-rows * cols // at_a_time)  # blocks of one multiprocessor, one after the other or beside each other
    products = (
        -(-steps_of(problem, config) // blocks) * shape.block_k(weights_of(problem)) // 16 * shape.warp_groups * shape.col_tiles
    )
    multiplying_us = products * (WIDEN_NS + ROW_NS * shape.block_m) / 1e3
    if shape.warp_groups * min(each, shape.blocks_per_sm) == 1:
        multiplying_us *= ALONE
    sent = shape.block_m * shape.block_n * 4 * (blocks - 1) / blocks
    ending_us = TILE_US + (TILE_US + sent / TILE_GBPS / 1e3 if blocks > 1 else 0.0)
    return LAUNCH_US[shape.blocks_per_sm] + max(each * (multiplying_us + ending_us), problem.bytes / DRAM_GBPS / 1e3)


def candidates(problem: Problem, device: DeviceInfo) -> list[Config]:
    """Every shape with every number of blocks, best first."""
    shapes = SHAPES[weights_of(problem).bits]
    found = [
        Config(shape=shape, cluster_k=size, pdl=True, prefetch_stages=shape.stages) for shape in shapes for size in CLUSTER_SIZES
    ]
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), str(config)))
