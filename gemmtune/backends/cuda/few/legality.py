"""Which problems the kernel can serve, and with which configs: one predicate, without a GPU or a compiler."""

from __future__ import annotations

from ....device import DeviceInfo
from ....problem import Problem
from ..mixed.legality import why_not_mixed
from ..mixed.weights import weights_of
from .configs import Config

__all__ = ["check_config", "check_problem", "steps_of", "tiles_of"]

MOST_TILES = 2**16 - 1
"""A dimension of a grid."""
MOST_ROWS = 32
"""More take more instructions a weight than memory leaves time for."""
MOST_BLOCKS = 8
"""Of a cluster, on every device that has clusters."""


def check_problem(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no config at all can serve the problem on this device, or None."""
    reason = why_not_mixed(problem, device)
    if reason is None and problem.m > MOST_ROWS:
        return f"a has {problem.m} rows, at most {MOST_ROWS} are served"
    return reason


def tiles_of(problem: Problem, config: Config) -> int:
    """Of b's columns."""
    return -(-problem.n // config.shape.cols)


def steps_of(problem: Problem) -> int:
    """Of K, one stage each."""
    return -(-problem.k // weights_of(problem).depth)


def check_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem with which ``check_problem`` found nothing wrong, or None."""
    shape, weights = config.shape, weights_of(problem)
    if problem.m > 8 * shape.eights:
        return f"a has {problem.m} rows, the kernel {8 * shape.eights}"
    shared_bytes = shape.shared_bytes(weights) + (shape.received_bytes if config.blocks > 1 else 0)
    if shared_bytes > device.smem_per_block_bytes:
        return f"takes {shared_bytes} bytes of shared memory, a block has {device.smem_per_block_bytes}"
    if config.blocks > MOST_BLOCKS:
        return f"{config.blocks} blocks in a cluster, at most {MOST_BLOCKS} are allowed"
    steps, tiles = steps_of(problem), tiles_of(problem, config)
    if config.blocks > steps:
        return f"K has {steps} steps, too few for {config.blocks} blocks"
    if tiles > MOST_TILES:
        return f"{tiles} tiles, at most {MOST_TILES} fit a grid"
    needed, most = shape.registers(weights), shape.most_registers(shape.resident(weights))
    return f"needs about {needed} registers for each thread, {most} are left" if needed > most else None
