"""Which block-sparse weights the kernels for small blocks take."""

from __future__ import annotations

import dataclasses

from ....choice import Claims
from ....device import DeviceInfo
from ....problem import Problem
from ..family import INT32_LIMIT, float32_sums, why_not_epilogue, why_not_here
from .configs import FRAGMENT

BLOCKS = (16, 32)


def why_not_weight(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no kernel for small blocks serves the problem on the device, whatever x is, or None."""
    sparsity = problem.sparsity
    if sparsity is None:
        return "b is not block-sparse"
    if (reason := why_not_here(problem, device) or why_not_epilogue(problem)) is not None:
        return reason
    if not problem.prepacked:
        return "its blocks are packed once: gemmtune.prepack makes a weight that it takes"
    if sparsity.block_n != sparsity.block_k or sparsity.block_k not in BLOCKS:
        return f"blocks of {sparsity.sides}, expected 16x16 or 32x32"
    if problem.n * problem.k >= INT32_LIMIT * FRAGMENT**2:
        return "more blocks than indices of 32 bits can count"
    return None


def block_of(problem: Problem) -> int:
    """The side of a block."""
    assert problem.sparsity is not None
    return problem.sparsity.block_k


def claims_of_blocks(splits: int = 1) -> Claims:
    """Claims of a kernel that multiplies blocks that exist and no others, divided into so many parts."""
    return dataclasses.replace(float32_sums(splits=splits), skips_absent=True)
