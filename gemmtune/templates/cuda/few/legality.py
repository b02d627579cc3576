"""Which problems the kernel can serve, and with which configs: one predicate, without a GPU or a compiler."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....device import DeviceInfo
from ....problem import Layout, Problem
from ....problem.dtypes import dtype_name
from ..compiler import CAPABILITY
from .configs import Config, weights_of
from .source import MOST_OPERANDS

__all__ = ["check_config", "check_problem", "is_along_k", "steps_of", "tiles_of"]

INT32_LIMIT = 2**31
MOST_TILES = 2**16 - 1
"""A dimension of a grid."""
MOST_ROWS = 32
"""More take more instructions a weight than memory leaves time for."""
MOST_BLOCKS = 8
"""Of a cluster, on every device that has clusters."""
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
ALIGNED_BYTES = 16
"""What TMA asks of addresses and pitches."""


def check_problem(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no config at all can serve the problem on this device, or None."""
    if device.type != "cuda" or device.capability != CAPABILITY:
        return f"works on CUDA devices of compute capability 9.0, not on {device.arch}"
    if problem.op != "mixed_mm":
        return f"{problem.op} is not an operation of this kernel, which has mixed_mm"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"a is {dtype_name(problem.dtype)}, expected bfloat16 or float16"
    if problem.b.dtype not in (torch.int8, torch.uint8):
        return f"b is {dtype_name(problem.b.dtype)}, expected integers"
    if problem.out.dtype not in RESULTS:
        return f"the result is {dtype_name(problem.out.dtype)}, expected one of {', '.join(map(dtype_name, RESULTS))}"
    if problem.empty or problem.k == 0:
        return "the product is empty: nothing is launched"
    if problem.m > MOST_ROWS:
        return f"a has {problem.m} rows, at most {MOST_ROWS} are served"
    if max(problem.n, problem.k) >= INT32_LIMIT:
        return "a size does not fit 32 bits"
    return _operands(problem) or _epilogue(problem)


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


def _epilogue(problem: Problem) -> str | None:
    """Why the epilogue cannot be expressed, or None."""
    if problem.epilogue is None:
        return None
    operands, most = problem.epilogue.operands, MOST_OPERANDS - len(problem.scales)
    if len(operands) > most:
        return f"the epilogue has {len(operands)} operands, a launch passes at most {most}"
    for i, x in enumerate(operands):
        if x.dtype not in RESULTS:
            return f"operand {i} of the epilogue is {dtype_name(x.dtype)}, expected one of {', '.join(map(dtype_name, RESULTS))}"
    if any(node.dtype == torch.float64 for node in problem.epilogue.nodes):
        return "the epilogue computes in float64, this backend in float32"
    return None


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
