"""Which problems the kernel can serve, and with which configs: one predicate, without a GPU or a compiler."""

from __future__ import annotations

from ....device import DeviceInfo
from ....problem import Problem
from ..hopper import MOST_CLUSTER, MOST_GRID, registers_per_thread
from ..mixed.legality import why_not_mixed
from ..mixed.weights import weights_of
from .configs import Config

__all__ = ["steps_of", "tiles_of", "why_not", "why_not_config"]

MOST_ROWS = 32
"""More rows take more instructions a weight than memory leaves time for."""


def why_not(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no config at all can serve the problem on this device, or None."""
    reason = why_not_mixed(problem, device)
    if reason is None and problem.m > MOST_ROWS:
        return f"a has {problem.m} rows, at most {MOST_ROWS} are served"
    return reason


def tiles_of(problem: Problem, config: Config) -> int:
    """How many tiles b's columns have."""
    return -(-problem.n // config.shape.block_n)


def steps_of(problem: Problem) -> int:
    """How many steps K has, one stage each."""
    return -(-problem.k // weights_of(problem).block_k())


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem with which ``why_not`` found nothing wrong, or None."""
    shape, weights = config.shape, weights_of(problem)
    if problem.m > shape.block_m:
        return f"a has {problem.m} rows, the kernel {shape.block_m}"
    shared_bytes = shape.shared_bytes(weights, config.cluster_k)
    if shared_bytes > device.smem_per_block_bytes:
        return f"takes {shared_bytes} bytes of shared memory, a block has {device.smem_per_block_bytes}"
    if config.cluster_k > MOST_CLUSTER:
        return f"{config.cluster_k} blocks in a cluster, at most {MOST_CLUSTER} are allowed"
    steps, tiles = steps_of(problem), tiles_of(problem, config)
    if config.cluster_k > steps:
        return f"K has {steps} steps, too few for {config.cluster_k} blocks"
    if tiles > MOST_GRID:
        return f"{tiles} tiles, at most {MOST_GRID} fit a grid"
    needed, most = shape.registers(weights), registers_per_thread(shape.threads, shape.blocks_per_sm(weights))
    return f"needs about {needed} registers for each thread, {most} are left" if needed > most else None
