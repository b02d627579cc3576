"""Which problems the kernel can serve, and with which configs: one predicate, without a GPU or a compiler."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....device import DeviceInfo
from ....problem import Layout, Problem
from ....problem.dtypes import dtype_name
from ..legal import why_not_epilogue, why_not_here
from .configs import Config, weights_of

__all__ = ["check_config", "check_problem", "is_along_k", "steps_of", "tiles_of"]

MOST_TILES = 2**16 - 1
"""A dimension of a grid."""
MOST_ROWS = 32
"""More take more instructions a weight than memory leaves time for."""
MOST_BLOCKS = 8
"""Of a cluster, on every device that has clusters."""
ALIGNED_BYTES = 16
"""What TMA asks of addresses and pitches."""


def check_problem(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no config at all can serve the problem on this device, or None."""
    reason = _weights(problem) or why_not_here(problem, device)
    if reason is not None:
        return reason
    if problem.m > MOST_ROWS:
        return f"a has {problem.m} rows, at most {MOST_ROWS} are served"
    return _operands(problem) or why_not_epilogue(problem)


def _weights(problem: Problem) -> str | None:
    """Why the problem is none with weights that the kernel knows, or None."""
    if problem.op != "mixed_mm":
        return f"{problem.op} is not an operation of this kernel, which has mixed_mm"
    if problem.b.dtype not in (torch.int8, torch.uint8):
        return f"b is {dtype_name(problem.b.dtype)}, expected integers"
    return None


def _operands(problem: Problem) -> str | None:
    """Why an operand cannot be copied as it lies, or None."""
    chunk = weights_of(problem).chunk
    if problem.k % chunk:
        return f"K is {problem.k}, expected a multiple of {chunk}"
    for name, layout, where in (("a", problem.a, "rows"), ("the transpose of b", problem.b.transposed, "rows, its columns,")):
        if not _has_lines(layout):
            strides = f"has strides {layout.stride} and offset {layout.offset}"
            return f"{name} {strides}: TMA copies contiguous {where} that are aligned to {ALIGNED_BYTES} bytes"
    for name, layout, along_k in zip(("scale_b", "zero_b"), problem.scales, is_along_k(problem), strict=False):
        if along_k and not _has_lines(layout):
            strides = f"has strides {layout.stride} and offset {layout.offset}"
            return f"{name} {strides}: TMA copies contiguous rows that are aligned to {ALIGNED_BYTES} bytes"
    return None


def is_along_k(problem: Problem) -> Iterator[bool]:
    """Of each of the problem's scales, whether it changes along K."""
    weights = weights_of(problem)
    return (bool(x.group) for x in (weights.scale, weights.zero) if x is not None)


def _has_lines(layout: Layout) -> bool:
    """Whether TMA can copy the rows of a matrix."""
    row, col = layout.stride
    size = layout.dtype.itemsize
    pitched = layout.size[0] == 1 or (row * size % ALIGNED_BYTES == 0 and row >= layout.size[1])
    return (col == 1 or layout.size[1] == 1) and pitched and layout.offset * size % ALIGNED_BYTES == 0


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
