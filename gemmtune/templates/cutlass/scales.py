"""Which quantized problems CUTLASS's kernels serve: bytes times bytes or 16-bit floats, with scales that are applied to sums."""

from __future__ import annotations

from typing import Literal

import torch

from ...device import DeviceInfo
from ...problem import Problem
from ...problem.dtypes import dtype_name
from .orientation import block_scaled

__all__ = ["why_not_quantized"]

NAMES: tuple[Literal["scale_a", "scale_b"], ...] = ("scale_a", "scale_b")
ALIGNED_SCALES = 4
"""Elements of 16 bytes: TMA may read a line of scales."""
ONE_BYTE_FLOATS = 90
"""The compute capability whose operations multiply 8-bit floats here, and convert b on its way to the tensor cores."""


def why_not_quantized(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no operation can serve a quantized problem; None where one may, and for every dense problem."""
    if problem.op in ("scaled_mm", "mixed_mm") and device.capability != ONE_BYTE_FLOATS:
        return f"{problem.op} is served on sm{ONE_BYTE_FLOATS} alone, not on {device.arch}"
    if problem.encoding:
        return f"b is {problem.encoding}, two numbers in each byte; expected one in each"
    if problem.op == "mixed_mm" and problem.dtype not in (torch.float16, torch.bfloat16):
        return f"a is {dtype_name(problem.dtype)}, expected float16 or bfloat16 beside a narrower b"
    if problem.zero_b is not None:
        return "zero points are subtracted before products are summed; these kernels scale sums"
    if block_scaled(problem):
        return _why_not_blocks(problem)
    return next((reason for name in NAMES if (reason := _why_not_scale(problem, name)) is not None), None)


def _why_not_blocks(problem: Problem) -> str | None:
    """The main loop reads scales of blocks as neighbours in memory along K or across it."""
    for name, layout in zip(NAMES, problem.scales, strict=True):
        if not layout.row_major and not layout.column_major:
            return f"{name} is strided, expected rows or columns of neighbours in memory"
        across, extent = (layout.column_major, 0) if name == "scale_a" else (layout.row_major, 1)
        if across and problem.scale_block(name)[extent] == 1 and layout.alignment < ALIGNED_SCALES:
            return f"{name} has lines across K aligned to {layout.alignment} elements, expected {ALIGNED_SCALES}"
    return None


def _why_not_scale(problem: Problem, name: Literal["scale_a", "scale_b"]) -> str | None:
    """A sum has one scale of each operand if that does not change along K."""
    if getattr(problem, name) is None:
        return None
    rows, cols = problem.scale_block(name)
    along_k, across, extent = (cols, rows, problem.m) if name == "scale_a" else (rows, cols, problem.n)
    if along_k >= problem.k and (across == 1 or across >= extent):
        return None
    line = "row" if name == "scale_a" else "column"
    return f"{name} is for {rows}x{cols} elements; expected one for each whole {line}, or for all, which scales sums"
