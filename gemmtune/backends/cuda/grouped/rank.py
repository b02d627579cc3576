"""Which configs are tried for a problem, best first: a model of what a launch does, for rows that went to groups at random.

Its constants are rates of an H200; for other GPUs they are as good for an order.
"""

from __future__ import annotations

import dataclasses
import math

from ....device import DeviceInfo
from ....problem import Problem
from ..groups import strip_of_rows
from ..hopper import clusters_at_a_time
from .configs import BLOCK_K, FITTED, SHAPES, Config, Shape, clusters_beside

LAUNCH_US = 3.0
DRAM_GBPS = 4300.0
L2_GBPS = 8000.0
"""The rate from L2 to all multiprocessors; what is copied to both blocks of a cluster counts once."""
FLOPS_PER_NS = 6000.0
"""Of one multiprocessor, in products of 16 bits."""
LEAST_STEP_NS = 60.0
"""What waiting, asking and telling take of a step."""
TILE_US = 0.7
"""What a tile takes beside its steps: the first products of a tile, and the results, during which nothing is multiplied."""
LEAST_FITTED_ROWS = 32
"""Groups of fewer rows have one tile: there is nothing to divide."""
STORED_GBPS = 40.0
"""The rate at which a block stores its results."""


def groups_with_rows(problem: Problem) -> float:
    """The groups that get any, where each row goes to any group."""
    return max(1.0, problem.groups * -math.expm1(-problem.m / problem.groups))


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    """The model's time of one launch, in microseconds."""
    shape, rows = config.shape, config.tile[0] * config.shape.cluster_m
    lines_q = float(shape.block_n)
    if problem.divides_terms:
        groups, k, below = float(problem.groups), problem.k / problem.groups, float(-(-problem.m // rows))
    else:
        groups, k = groups_with_rows(problem), float(problem.k)
        share = problem.m / groups
        below = max(1.0, share / rows + 0.5)
        if shape.fitted:
            lines_q = min(shape.block_n, (share + shape.fitted / 2) / below)
    steps = math.ceil(k / BLOCK_K)
    clusters = groups * below * clusters_beside(problem, config)
    at_a_time = clusters_at_a_time(min(config.blocks, device.sm_count), shape.cluster)
    waves = math.ceil(clusters / at_a_time) if clusters < 2 * at_a_time else clusters / at_a_time + 0.5
    multiplying_ns = 2 * shape.block_m * lines_q * BLOCK_K / FLOPS_PER_NS
    shared_p, shared_q = (shape.cluster_m, shape.cluster_n) if config.swap_ab else (shape.cluster_n, shape.cluster_m)
    copied = 2 * BLOCK_K * (shape.block_m / shared_p + lines_q / shared_q)
    copying_ns = copied * device.sm_count / L2_GBPS
    step_ns = max(multiplying_ns, copying_ns, LEAST_STEP_NS)
    tile_us = TILE_US + shape.block_m * lines_q * problem.out.dtype.itemsize / STORED_GBPS / 1e3 + steps * step_ns / 1e3
    return LAUNCH_US + max(waves * tile_us, _memory_us(problem, groups)) + 0.01 * waves * tile_us


def _memory_us(problem: Problem, groups: float) -> float:
    weights = groups * problem.n * problem.k if not problem.divides_terms else problem.n * problem.k
    elements = problem.m * problem.k + weights + problem.out.numel
    return elements * problem.dtype.itemsize / DRAM_GBPS / 1e3


def candidates(problem: Problem, device: DeviceInfo) -> list[Config]:
    """Every shape, either way round, best first; fitted ones, of which there is one way, where groups have rows to divide."""
    found = [_told(shape, device, swap_ab=swap_ab) for shape in SHAPES if not shape.fitted for swap_ab in (False, True)]
    if not problem.divides_terms and problem.m > LEAST_FITTED_ROWS * problem.groups:
        found += [_told(shape, device, swap_ab=True) for shape in FITTED]
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), config.swap_ab, str(config)))


def _told(shape: Shape, device: DeviceInfo, *, swap_ab: bool) -> Config:
    config = Config(shape=shape, swap_ab=swap_ab, blocks=max(device.sm_count, shape.cluster), pdl=True)
    return dataclasses.replace(config, strip=strip_of(config))


def strip_of(config: Config) -> int:
    """The clusters of tiles that have the rows of a strip."""
    return strip_of_rows(config.tile[0] * config.shape.cluster_m)
