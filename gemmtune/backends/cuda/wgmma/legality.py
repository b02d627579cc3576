"""Which problems the kernel can serve, and with which configs: one predicate, without a GPU or a compiler."""

from __future__ import annotations

from ....device import DeviceInfo
from ....problem import Problem
from ..hopper import MOST_BOX, MOST_CLUSTER, MOST_GRID, SYSTEM_BYTES
from ..mixed.legality import why_not_mixed
from ..mixed.weights import weights_of
from .configs import Config

__all__ = ["steps_of", "tiles_of", "why_not", "why_not_config"]


def why_not(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no config at all can serve the problem on this device, or None."""
    return why_not_mixed(problem, device)


def tiles_of(problem: Problem, config: Config) -> tuple[int, int]:
    """How many tiles a's rows have, and b's columns."""
    return -(-problem.m // config.shape.block_m), -(-problem.n // config.shape.block_n)


def steps_of(problem: Problem, config: Config) -> int:
    """How many steps K has, one stage each."""
    return -(-problem.k // config.shape.block_k(weights_of(problem)))


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem with which ``why_not`` found nothing wrong, or None."""
    shape, weights = config.shape, weights_of(problem)
    shared_bytes = shape.shared_bytes(weights, config.cluster_k)
    if shared_bytes > device.smem_per_block_bytes:
        return f"takes {shared_bytes} bytes of shared memory, a block has {device.smem_per_block_bytes}"
    if shape.blocks_per_sm * (shared_bytes + SYSTEM_BYTES) > device.smem_per_block_bytes + SYSTEM_BYTES:
        return f"takes {shared_bytes} bytes of shared memory, too many for {shape.blocks_per_sm} blocks on a multiprocessor"
    if config.cluster_k > MOST_CLUSTER:
        return f"{config.cluster_k} blocks in a cluster, at most {MOST_CLUSTER} are allowed"
    if shape.block_n > MOST_BOX:
        return f"a tile has {shape.block_n} columns, at most {MOST_BOX} are copied at once"
    steps, (rows, cols) = steps_of(problem, config), tiles_of(problem, config)
    if config.cluster_k > steps:
        return f"K has {steps} steps, too few for {config.cluster_k} blocks"
    if max(rows, cols) > MOST_GRID:
        return f"{rows} by {cols} tiles, at most {MOST_GRID} fit a dimension of a grid"
    block_k = shape.block_k(weights)
    if block_k % 64 or block_k // 16 // shape.k16_batch_of(weights) % 2:
        return f"a stage has {block_k} of K, which is no even number of batches of lines"
    if shape.k16_batch_of(weights) % (8 // weights.bits):
        return f"a batch has {16 * shape.k16_batch_of(weights)} of K, less than the 16 bytes that are read at once"
    if shape.gives_registers and (shape.warp_groups != 2 or shape.blocks_per_sm > 1):
        return "registers are left by one group of warps to two others alone"
    needed, most = shape.registers(weights), shape.most_registers
    return f"needs about {needed} registers for each thread, {most} are left" if needed > most else None
