"""Which problems the kernels for mixed_mm can serve, as far as all of them ask the same."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....device import DeviceInfo
from ....problem import Layout, Problem
from ....problem.dtypes import dtype_name
from ..hopper import TMA_BYTES as ALIGNED_BYTES
from ..legality import why_not_epilogue, why_not_here
from .weights import weights_of

__all__ = ["is_along_k", "why_not_mixed"]


def why_not_mixed(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no kernel for mixed_mm serves the problem on this device, or None."""
    return _weights(problem) or why_not_here(problem, device) or _operands(problem) or why_not_epilogue(problem)


def _weights(problem: Problem) -> str | None:
    """Why the problem is none with weights that the kernel knows, or None."""
    if not problem.widens_b:
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
    """Whether each of the problem's scales changes along K."""
    weights = weights_of(problem)
    return (bool(x.group) for x in (weights.scale, weights.zero) if x is not None)


def _has_lines(layout: Layout) -> bool:
    """Whether TMA can copy the rows of a matrix."""
    row, col = layout.stride
    size = layout.dtype.itemsize
    pitched = layout.size[0] == 1 or (row * size % ALIGNED_BYTES == 0 and row >= layout.size[1])
    return (col == 1 or layout.size[1] == 1) and pitched and layout.offset * size % ALIGNED_BYTES == 0
