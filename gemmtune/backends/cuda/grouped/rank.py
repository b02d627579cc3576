"""Time model that orders the configs, for rows that go to groups at random, by an H200's rates."""

from __future__ import annotations

import dataclasses
import math

from ....device import DeviceInfo
from ....problem import Problem
from ..groups import strip_of_rows
from ..hopper import clusters_at_a_time
from .configs import BLOCK_K, FITTED, SHAPES, Config, Shape, clusters_along_n

LAUNCH_US = 3.0
DRAM_GBPS = 4300.0
L2_GBPS = 8000.0
"""Bandwidth from L2 to all multiprocessors. Multicast data counts once."""
FLOPS_PER_NS = 6000.0
"""Throughput of one multiprocessor for 16-bit products."""
LEAST_STEP_NS = 60.0
"""Barrier overhead of one pipeline step."""
TILE_US = 0.7
"""Overhead of a tile in addition to its steps: the first products and the stores, while tensor cores idle."""
LEAST_FITTED_ROWS = 32
"""Minimum mean rows of a group for fitted tiles. Smaller groups have one tile, with nothing to divide."""
STORED_GBPS = 40.0
"""Rate at which a block stores its results."""


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    """Return the model's time of one launch, in microseconds."""
    shape, rows = config.shape, config.tile[0] * config.shape.cluster_m
    lines_q = float(shape.block_n)
    if problem.divides_terms:
        groups, k, below = float(problem.groups), problem.k / problem.groups, float(-(-problem.m // rows))
    else:
        groups, k = max(1.0, problem.groups * -math.expm1(-problem.m / problem.groups)), float(problem.k)  # nonempty groups
        share = problem.m / groups
        below = max(1.0, share / rows + 0.5)
        if shape.fitted:
            lines_q = min(shape.block_n, (share + shape.fitted / 2) / below)
    steps = math.ceil(k / BLOCK_K)
    clusters = groups * below * clusters_along_n(problem, config)
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
    """Return every shape with and without ``swap_ab``, best first. Fitted shapes need ``swap_ab`` and groups with enough rows."""
    found = [_config(shape, device, swap_ab=swap_ab) for shape in SHAPES if not shape.fitted for swap_ab in (False, True)]
    if not problem.divides_terms and problem.m > LEAST_FITTED_ROWS * problem.groups:
        found += [_config(shape, device, swap_ab=True) for shape in FITTED]
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), config.swap_ab, str(config)))


def _config(shape: Shape, device: DeviceInfo, *, swap_ab: bool) -> Config:
    config = Config(shape=shape, swap_ab=swap_ab, blocks=max(device.sm_count, shape.cluster), pdl=True)
    return dataclasses.replace(config, strip=strip_of(config))


def strip_of(config: Config) -> int:
    """Return the clusters of tiles in a strip."""
    return strip_of_rows(config.tile[0] * config.shape.cluster_m)
