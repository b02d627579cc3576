"""Which configs are tried for a problem, best first: a model of what a multiprocessor multiplies and reads.

Its constants are those of an H200; for other GPUs they are as good for an order.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....device import DeviceInfo
from ....problem import Problem
from ..mixed.weights import weights_of
from .configs import SHAPES, Config, Shape
from .legality import steps_of, tiles_of

__all__ = ["BLOCKS", "candidates", "estimate_us", "select", "why_not_likely"]

BLOCKS = (1, 2, 3, 4)
"""Of a cluster, that divide K: more would add up longer than they multiply."""
LAUNCH_US = {1: 3.5, 2: 2.5}
"""By the blocks that have room on a multiprocessor: with two, one of the next launch begins before one of the last has ended."""
WIDEN_NS, ROW_NS = 15.6, 0.3
"""Of a product of 64 columns and 16 along K: once, and for each row."""
ALONE = 1.9
"""Times as long, where a multiprocessor has one group of warps: nothing is multiplied while it widens."""
DRAM_GBPS = 3800.0
"""Of b and a, once."""
TILE_US, TILE_GBPS = 1.0, 50.0
"""Of a tile's end: its results, and what each block of a cluster sends of its sums."""
UNUSED = {1: 0, 2: 0, 3: 3, 4: 3}
"""Clusters, by their blocks, that an H200 has multiprocessors for but no room in its graphics processing clusters."""
LIKELY = 1.25
"""Times the least time of the model: what takes longer is tried by an exhaustive search alone."""
LEAST_ROWS = {"quick": 33, "default": 33, "exhaustive": 1}
"""Of a: the kernel for few rows does no more than has to be done of fewer."""


def why_not_likely(problem: Problem, search: str) -> str | None:
    """Why the kernel is not tried in such a search, or None."""
    least = LEAST_ROWS[search]
    return f"a has {problem.m} rows, tried from {least} on" if problem.m < least else None


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    """The model's time of one launch, in microseconds."""
    shape, blocks = config.shape, config.blocks
    rows, cols = tiles_of(problem, config)
    at_a_time = max(device.sm_count // blocks - UNUSED[blocks], 1)
    each = -(-rows * cols // at_a_time)  # blocks of one multiprocessor, one after the other or beside each other
    products = -(-steps_of(problem, config) // blocks) * shape.depth(weights_of(problem)) // 16 * shape.groups * shape.tiles
    multiplying_us = products * (WIDEN_NS + ROW_NS * shape.rows) / 1e3
    if shape.groups * min(each, shape.resident) == 1:
        multiplying_us *= ALONE
    sent = shape.rows * shape.cols * 4 * (blocks - 1) / blocks
    ending_us = TILE_US + (TILE_US + sent / TILE_GBPS / 1e3 if blocks > 1 else 0.0)
    return LAUNCH_US[shape.resident] + max(each * (multiplying_us + ending_us), problem.bytes / DRAM_GBPS / 1e3)


def candidates(problem: Problem, device: DeviceInfo) -> list[Config]:
    """Every shape with every number of blocks, best first."""
    shapes = SHAPES[weights_of(problem).bits]
    found = [Config(shape=shape, blocks=blocks, pdl=True, ahead=shape.stages) for shape in shapes for blocks in BLOCKS]
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), str(config)))


def select(problem: Problem, device: DeviceInfo, ordered: Sequence[Config], count: int) -> list[Config]:
    """Of configs, best first, the first ``count`` shapes that are likely, each with its likeliest number of blocks."""
    likeliest: dict[Shape, Config] = {}
    for config in ordered:
        likeliest.setdefault(config.shape, config)
    times_us = {config: estimate_us(problem, device, config) for config in likeliest.values()}
    return [config for config, time_us in times_us.items() if time_us <= LIKELY * min(times_us.values())][:count]
