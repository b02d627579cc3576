"""Checks of block-sparse weights that the kernels for small blocks share."""

from __future__ import annotations

import dataclasses

from ....choice import Claims
from ....device import DeviceInfo
from ....problem import Problem
from ..family import INT32_LIMIT, float32_sums, why_not_epilogue, why_not_here
from .configs import FRAGMENT

BLOCKS = (16, 32)


def why_not_weight(problem: Problem, device: DeviceInfo) -> str | None:
    """Return the reason why no kernel for small blocks serves the problem's weight on the device, or None."""
    sparsity = problem.sparsity
    if sparsity is None:
        return "b is not block-sparse"
    if (reason := why_not_here(problem, device) or why_not_epilogue(problem)) is not None:
        return reason
    if not problem.prepacked:
        return "b is not prepacked, and packing is done once: pass the result of gemmtune.prepack"
    if sparsity.block_n != sparsity.block_k or sparsity.block_k not in BLOCKS:
        return f"blocks of {sparsity.sides}, expected 16x16 or 32x32"
    if problem.n * problem.k >= INT32_LIMIT * FRAGMENT**2:
        return "more blocks than indices of 32 bits can count"
    return None


def block_of(problem: Problem) -> int:
    """Return the side of a block."""
    return problem.blocks.block_k


def claims_of_blocks(splits: int = 1) -> Claims:
    """Return the claims of a kernel that multiplies only existing blocks, in ``splits`` partial sums."""
    return dataclasses.replace(float32_sums(splits=splits), skips_absent=True)
