"""Which problems the kernel can serve, and with which configs: one predicate, without a GPU or a compiler."""

from __future__ import annotations

from ....device import DeviceInfo
from ....problem import Problem
from ..mixed.legality import why_not_mixed
from ..mixed.weights import weights_of
from .configs import SYSTEM_BYTES, Config

__all__ = ["check_config", "check_problem", "steps_of", "tiles_of"]

MOST_TILES = 2**16 - 1
"""A dimension of a grid."""
MOST_BLOCKS = 8
"""Of a cluster, on every device that has clusters."""
MOST_COLS = 256
"""Of b, that TMA copies at once."""


def check_problem(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no config at all can serve the problem on this device, or None."""
    return why_not_mixed(problem, device)


def tiles_of(problem: Problem, config: Config) -> tuple[int, int]:
    """Of a's rows, and of b's columns."""
    return -(-problem.m // config.shape.rows), -(-problem.n // config.shape.cols)


def steps_of(problem: Problem, config: Config) -> int:
    """Of K, one stage each."""
    return -(-problem.k // config.shape.depth(weights_of(problem)))


def check_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem with which ``check_problem`` found nothing wrong, or None."""
    shape, weights = config.shape, weights_of(problem)
    shared_bytes = shape.shared_bytes(weights, config.blocks)
    if shared_bytes > device.smem_per_block_bytes:
        return f"takes {shared_bytes} bytes of shared memory, a block has {device.smem_per_block_bytes}"
    if shape.resident * (shared_bytes + SYSTEM_BYTES) > device.smem_per_block_bytes + SYSTEM_BYTES:
        return f"takes {shared_bytes} bytes of shared memory, too many for {shape.resident} blocks on a multiprocessor"
    if config.blocks > MOST_BLOCKS:
        return f"{config.blocks} blocks in a cluster, at most {MOST_BLOCKS} are allowed"
    if shape.cols > MOST_COLS:
        return f"a tile has {shape.cols} columns, at most {MOST_COLS} are copied at once"
    steps, (rows, cols) = steps_of(problem, config), tiles_of(problem, config)
    if config.blocks > steps:
        return f"K has {steps} steps, too few for {config.blocks} blocks"
    if max(rows, cols) > MOST_TILES:
        return f"{rows} by {cols} tiles, at most {MOST_TILES} fit a dimension of a grid"
    depth = shape.depth(weights)
    if depth % 64 or depth // 16 // shape.batch_of(weights) % 2:
        return f"a stage has {depth} of K, which is no even number of batches of lines"
    if shape.batch_of(weights) % (8 // weights.bits):
        return f"a batch has {16 * shape.batch_of(weights)} of K, less than the 16 bytes that are read at once"
    if shape.many_sums and (shape.groups != 2 or shape.resident > 1):
        return "registers are left by one group of warps to two others alone"
    needed, most = shape.registers(weights), shape.most_registers
    return f"needs about {needed} registers for each thread, {most} are left" if needed > most else None
