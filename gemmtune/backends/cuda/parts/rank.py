"""Time model that orders the configs, as the sum of a launch's phases, by an H200's rates."""

from ....device import DeviceInfo
from ....problem import Problem
from ..boxes import operands_of
from ..hopper import clusters_at_a_time
from .configs import BLOCK_K, SHAPES, Config, Shape, copies_p, is_packed, steps_of, tiles_of

LAUNCH_US, SPLIT_US = 2.5, 2.0
"""Minimum time of a launch, and the additional time of the splitting kernel."""
SPLIT_GBPS = 3300.0
"""Rate at which numbers are read and their parts written."""
DRAM_GBPS = 3800.0
L2_GBPS = 5500.0
FLOPS_PER_NS, HALVES_PER_NS = 5000.0, 5400.0
"""Throughput of one multiprocessor in bfloat16 products: with whole steps, and with alternating halves."""
ALONE = 1.5
"""Slowdown with a single warp group on a multiprocessor: nothing multiplies while it splits and adds."""
SPLIT_STEP_NS = 90.0
"""Minimum time of a tile's step."""
TILE_US = 1.2
"""Time of the beginning and the end of a tile."""
KEPT_US = 0.5
"""Part of that time which a persistent block saves."""
EXCHANGE_GBPS = 60.0
"""Rate at which each block of a cluster sends its sums."""
KEPT_GBPS = 100.0
"""Rate at which a block adds sums to those in shared memory."""


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    shape, tiles = config.shape, tiles_of(problem, config)
    at_a_time = clusters_at_a_time(device.sm_count, shape.cluster_k)
    waves = -(-tiles // at_a_time)
    steps = -(-steps_of(problem) // shape.cluster_k)
    multiplying_ns = 12 * shape.block_m * shape.block_n * BLOCK_K / (FLOPS_PER_NS if shape.halves == 1 else HALVES_PER_NS)
    step_ns = max(multiplying_ns * (ALONE if shape.warp_groups == 1 else 1.0), SPLIT_STEP_NS)
    tile_us = TILE_US - (KEPT_US if config.blocks else 0.0) + steps * step_ns / 1e3
    if shape.cluster_k > 1:
        tile_us += 1.0 + shape.sent_bytes / EXCHANGE_GBPS / 1e3
    if shape.keeps:
        tile_us += (steps - 1) // shape.gathered_steps * shape.kept_bytes / KEPT_GBPS / 1e3
    p, q, _ = operands_of(problem, swap_ab=config.swap_ab)
    rows, cols = p.size[-2], q.size[-2]
    read_us = (4 * rows + 6 * cols) * problem.k * problem.batch / DRAM_GBPS / 1e3
    copied_us = tiles * steps_of(problem) * shape.stage_bytes / L2_GBPS / 1e3
    return LAUNCH_US + _splitting_us(problem, config, rows, cols) + max(waves * tile_us, read_us, copied_us)


def _splitting_us(problem: Problem, config: Config, rows: int, cols: int) -> float:
    if is_packed(problem, config):
        return 0.0
    bytes_of = 10 * cols + (8 * rows if copies_p(problem, config) else 0)
    return SPLIT_US + bytes_of * problem.k * problem.batch / SPLIT_GBPS / 1e3


def candidates(problem: Problem, device: DeviceInfo) -> list[Config]:
    found = [_filled(shape, problem, device, swap_ab=swap_ab) for shape in SHAPES for swap_ab in (False, True)]
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), config.swap_ab, str(config)))


def _filled(shape: Shape, problem: Problem, device: DeviceInfo, *, swap_ab: bool) -> Config:
    config = Config(shape=shape, swap_ab=swap_ab, pdl=True)
    persistent = shape.cluster_k == 1 and tiles_of(problem, config) > device.sm_count
    return Config(shape=shape, swap_ab=swap_ab, blocks=device.sm_count if persistent else 0, pdl=True)
