"""Which configs are tried for a problem, best first: a model of what a launch reads, at which rate.

Its constants are rates of an H200; for other GPUs they are as good for an order.
"""

from __future__ import annotations

from ....device import DeviceInfo
from ....problem import Problem
from ..hopper import IDLE_CLUSTERS, clusters_at_a_time
from ..mixed.weights import weights_of
from .configs import SHAPES, Config, Shape
from .legality import steps_of, tiles_of

__all__ = ["candidates", "cluster_sizes", "estimate_us"]

LAUNCH_US = {1: 3.5, 2: 2.5}
"""By the blocks that have room on a multiprocessor: with two, one of the next launch begins before one of the last has ended."""
DRAM_GBPS = 4300.0
L2_GBPS = 5500.0
"""The rate from L2 to all multiprocessors: b is read once, and a once for each tile."""
HALF_RATE_BYTES = 2 * 2**20
"""With so many bytes on their way to all multiprocessors, half of either rate is reached."""
FILLED = 0.9
"""The share of the multiprocessors that reads all that memory can give."""
EXCHANGE_US = 0.3
"""What each block of a cluster takes longer, beside the first."""


def cluster_sizes(shape: Shape, problem: Problem, device: DeviceInfo) -> tuple[int, ...]:
    """How many blocks of a cluster may divide K, the likeliest first."""
    configs = [Config(shape=shape, cluster_k=size) for size in IDLE_CLUSTERS if size <= steps_of(problem)]
    return tuple(config.cluster_k for config in sorted(configs, key=lambda config: estimate_us(problem, device, config)))


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    """The model's time of one launch, in microseconds."""
    shape, blocks, weights, tiles = config.shape, config.cluster_k, weights_of(problem), tiles_of(problem, config)
    stage_bytes, resident = shape.stage_bytes(weights), shape.blocks_per_sm(weights)
    at_a_time = clusters_at_a_time(device.sm_count, blocks)
    each = -(-tiles // at_a_time)  # clusters that one multiprocessor has a block of, at most
    busy = tiles * blocks / each  # multiprocessors, on an average of the time
    on_their_way = busy * min(each, resident) * shape.stages * stage_bytes
    rate = on_their_way / (on_their_way + HALF_RATE_BYTES) * min(1.0, busy / (FILLED * device.sm_count))
    copied = tiles * steps_of(problem) * stage_bytes
    reading_us = max(copied / L2_GBPS, problem.bytes / DRAM_GBPS) / rate / 1e3
    return LAUNCH_US[resident] + reading_us + EXCHANGE_US * (blocks - 1)


def candidates(problem: Problem, device: DeviceInfo) -> list[Config]:
    """Every shape with the least rows that are enough, with every number of blocks; best first."""
    block_m = min((shape.block_m for shape in SHAPES if shape.block_m >= problem.m), default=0)
    shapes = [shape for shape in SHAPES if shape.block_m == block_m]
    found = [_told(shape, blocks, problem) for shape in shapes for blocks in cluster_sizes(shape, problem, device)]
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), str(config)))


def _told(shape: Shape, blocks: int, problem: Problem) -> Config:
    """Steps are asked into L2 where a block has room to begin early. Two blocks with interleaved parts read neighbouring lines."""
    begins_early = shape.blocks_per_sm(weights_of(problem)) > 1
    return Config(
        shape=shape,
        cluster_k=blocks,
        interleaved_k=blocks == 2 and begins_early,
        pdl=True,
        prefetch_stages=shape.stages if begins_early else 0,
    )
