"""Which configs are tried for a problem, best first: a model of what a launch reads, at which rate.

Its constants are rates of an H200; for other GPUs they are as good for an order.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....device import DeviceInfo
from ....problem import Problem
from ..mixed.weights import weights_of
from .configs import SHAPES, Config, Shape
from .legality import steps_of, tiles_of

__all__ = ["blocks_of", "candidates", "estimate_us", "select"]

LAUNCH_US = {1: 3.5, 2: 2.5}
"""By the blocks that have room on a multiprocessor: with two, one of the next launch begins before one of the last has ended."""
DRAM_GBPS = 4300.0
L2_GBPS = 5500.0
"""From L2 to all multiprocessors: of b once, and of a once for each tile."""
HALF_RATE_BYTES = 2 * 2**20
"""On their way to all multiprocessors, with which half of either rate is reached."""
FILLED = 0.9
"""Of the multiprocessors: as many read all that memory can give."""
EXCHANGE_US = 0.3
"""For each block of a cluster beside the first."""
LIKELY = 1.35
"""Times the least time of the model: what takes longer is tried by an exhaustive search alone."""
UNUSED = {1: 0, 2: 0, 3: 3, 4: 3, 8: 1}
"""Clusters, by their blocks, that an H200 has multiprocessors for but no room in its graphics processing clusters."""


def blocks_of(shape: Shape, problem: Problem, device: DeviceInfo) -> tuple[int, ...]:
    """How many blocks of a cluster may divide K, the likeliest first."""
    configs = [Config(shape=shape, blocks=blocks) for blocks in UNUSED if blocks <= steps_of(problem)]
    return tuple(config.blocks for config in sorted(configs, key=lambda config: estimate_us(problem, device, config)))


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    """The model's time of one launch, in microseconds."""
    shape, blocks, weights, tiles = config.shape, config.blocks, weights_of(problem), tiles_of(problem, config)
    stage_bytes, resident = shape.stage_bytes(weights), shape.resident(weights)
    at_a_time = max(device.sm_count // blocks - UNUSED[blocks], 1)
    each = -(-tiles // at_a_time)  # clusters that one multiprocessor has a block of, at most
    busy = tiles * blocks / each  # multiprocessors, on an average of the time
    on_their_way = busy * min(each, resident) * shape.stages * stage_bytes
    rate = on_their_way / (on_their_way + HALF_RATE_BYTES) * min(1.0, busy / (FILLED * device.sm_count))
    copied = tiles * steps_of(problem) * stage_bytes
    reading_us = max(copied / L2_GBPS, problem.bytes / DRAM_GBPS) / rate / 1e3
    return LAUNCH_US[resident] + reading_us + EXCHANGE_US * (blocks - 1)


def candidates(problem: Problem, device: DeviceInfo) -> list[Config]:
    """Every shape with the least rows that are enough, with every number of blocks; best first."""
    eights = min((shape.eights for shape in SHAPES if 8 * shape.eights >= problem.m), default=0)
    shapes = [shape for shape in SHAPES if shape.eights == eights]
    found = [_told(shape, blocks, problem) for shape in shapes for blocks in blocks_of(shape, problem, device)]
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), str(config)))


def _told(shape: Shape, blocks: int, problem: Problem) -> Config:
    """Steps are asked into L2 where a block has room to begin early. Two blocks that take turns read lines beside each other."""
    begins_early = shape.resident(weights_of(problem)) > 1
    return Config(
        shape=shape, blocks=blocks, takes_turns=blocks == 2 and begins_early, pdl=True, ahead=shape.stages if begins_early else 0
    )


def select(problem: Problem, device: DeviceInfo, ordered: Sequence[Config], count: int) -> list[Config]:
    """Of configs, best first, the first ``count`` shapes that are likely, each with its likeliest number of blocks."""
    likeliest: dict[Shape, Config] = {}
    for config in ordered:
        likeliest.setdefault(config.shape, config)
    times_us = {config: estimate_us(problem, device, config) for config in likeliest.values()}
    return [config for config, time_us in times_us.items() if time_us <= LIKELY * min(times_us.values())][:count]
