"""The model that ranks the configs. Its constants are those of an H200; for other GPUs they are as good for an order."""

from __future__ import annotations

from ....device import DeviceInfo
from ....problem import Problem
from ..hopper import LINE_BYTES, clusters_at_a_time
from .configs import SHAPES, UNIT, UNIT_BYTES, Config, Shape, room_of, tiles_n_of, tiles_of

LAUNCH_US = 3.5
"""What a launch takes at the least."""
TILE_US = {1: 1.5, 2: 0.8}
"""The time of the beginning and the end of a tile, by the blocks on a multiprocessor."""
DRAM_GBPS = 3800.0
SM_GBPS = 60.0
"""The rate at which one multiprocessor copies what is in L2; what is copied once for several counts in parts."""
FLOPS_PER_NS = 5500.0
"""The rate of one multiprocessor, in products of 16 bits."""
ALONE = 1.4
"""Times as long, where a multiprocessor has one warp group: nothing is multiplied while it adds and stores."""
STEP_NS = 40.0
"""What a step takes at the least."""
EXCHANGE_GBPS = 60.0
"""The rate at which each block of a cluster sends its sums."""
STRIP_TOKENS = 2048
"""The tokens of a strip: so much of x stays in L2 while all rows of the weight are gone through."""
SKEWED = 1.3
"""Times as long, where long rows of the weight keep some blocks busy while others have ended."""


def densities(problem: Problem, shape: Shape) -> tuple[float, float]:
    """The shares of the units that exist, and of the steps in which one of a tile's rows has one, where blocks lie by chance."""
    sparsity = problem.sparsity
    assert sparsity is not None
    joined = max(UNIT / sparsity.block_n, 1.0) * max(UNIT / sparsity.block_k, 1.0)
    units = 1 - (1 - sparsity.density) ** joined
    independent = max(shape.block_m / max(sparsity.block_n, UNIT), 1.0)
    return units, 1 - (1 - units) ** independent


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    """The model's time of a launch, in microseconds."""
    shape, (units, steps), sparsity = config.shape, densities(problem, config.shape), problem.sparsity
    assert sparsity is not None
    along_k = -(-problem.k // UNIT)
    each = along_k / shape.cluster_k
    copied = each * (units * shape.warp_groups * UNIT_BYTES / shape.cluster_n + steps * shape.block_n * LINE_BYTES)
    multiplied = 2 * units * each * UNIT * shape.block_m * shape.block_n
    tiles = tiles_of(problem, shape)
    at_a_time = clusters_at_a_time(device.sm_count, shape.cluster)
    beside = min(shape.blocks_per_sm, -(-tiles // at_a_time))
    rounds = -(-tiles // (at_a_time * beside))
    alone = ALONE if shape.warp_groups * beside == 1 else 1.0
    busy_ns = max(beside * copied / SM_GBPS, beside * multiplied / FLOPS_PER_NS * alone, steps * each * STEP_NS)
    tile_us = TILE_US[beside] + busy_ns / 1e3
    if shape.cluster_k > 1:
        tile_us += 1.0 + shape.sent_bytes / EXCHANGE_GBPS / 1e3
    read = 2 * (units * problem.n + problem.m) * problem.k + problem.out.dtype.itemsize * problem.m * problem.n
    uneven = SKEWED if sparsity.imbalance == "skewed" else 1.0
    return LAUNCH_US + uneven * max(rounds * tile_us, read / DRAM_GBPS / 1e3)


def candidates(problem: Problem, device: DeviceInfo) -> list[Config]:
    """Every shape, best first; blocks go on from tile to tile where there are more tiles than have room."""
    found = [_filled(shape, problem, device) for shape in SHAPES]
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), str(config)))


def _filled(shape: Shape, problem: Problem, device: DeviceInfo) -> Config:
    room = room_of(device, shape)
    persistent = shape.cluster_k == 1 and tiles_of(problem, shape) * shape.cluster > room
    return Config(shape=shape, blocks=room if persistent else 0, strip=strip_of(problem, shape), pdl=True)


def strip_of(problem: Problem, shape: Shape) -> int:
    """The clusters' tiles of a strip: all of them where rows differ much in length, so that the longest come first of all."""
    beside = tiles_n_of(problem, shape)
    assert problem.sparsity is not None
    skewed = problem.sparsity.imbalance == "skewed"
    return beside if skewed else min(max(STRIP_TOKENS // (shape.block_n * shape.cluster_n), 1), beside)
