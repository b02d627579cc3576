"""Which quantized problems CUTLASS's kernels serve: by what their scales are for, and how these lie in memory.

A scale that does not change along K multiplies sums. Scales of groups multiply weights where these are converted, and so do scales
that come with zero points: the main loop reads them through TMA, one line across K for each of its steps.
"""

from __future__ import annotations

from typing import Literal

import torch

from ...device import DeviceInfo
from ...problem import Layout, Problem
from ...problem.dtypes import dtype_name
from ...toolchain.orientation import block_scaled, scales_weights
from .operation import Operation

__all__ = ["why_not_grouped", "why_not_quantized"]

Name = Literal["scale_a", "scale_b", "zero_b"]
NAMES: tuple[Literal["scale_a", "scale_b"], ...] = ("scale_a", "scale_b")
LEAST_GROUP = 64
"""Elements along K: the least depth of a tile."""
ALIGNED_BYTES = 16
"""What TMA asks of addresses and lines."""
ALIGNED_SCALES = 4
"""Elements of 16 bytes: TMA may read a line of scales."""
ONE_BYTE_FLOATS = 90
"""The compute capability whose operations multiply 8-bit floats here, and convert b on its way to the tensor cores."""


def why_not_quantized(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no operation can serve a quantized problem; None where one may, and for every dense problem."""
    if (problem.float8 or problem.widens_b) and device.capability != ONE_BYTE_FLOATS:
        return f"{problem.op} is served on sm{ONE_BYTE_FLOATS} alone, not on {device.arch}"
    if problem.widens_b and problem.dtype not in (torch.float16, torch.bfloat16):
        return f"a is {dtype_name(problem.dtype)}, expected float16 or bfloat16 beside a narrower b"
    if scales_weights(problem):
        return _why_not_weights(problem)
    if block_scaled(problem):
        return _why_not_blocks(problem)
    return next((reason for name in NAMES if (reason := _why_not_scale(problem, name)) is not None), None)


def why_not_grouped(operation: Operation, problem: Problem) -> str | None:
    """Why the main loop of ``operation`` cannot read the scales of weights."""
    if operation.weights is None:
        return None
    group, depth = problem.scale_block("scale_b")[0], operation.tile[2]
    if group < problem.k and group % depth:
        return f"a step of its main loop, {depth} elements along K, has one scale; those of the problem are for {group}"
    return None


def _why_not_weights(problem: Problem) -> str | None:
    if problem.zero_b is not None and not problem.prepacked:
        return "zero points are subtracted from prepacked weights alone (gemmtune.prepack): CUTLASS adds them to scaled ones"
    if problem.zero_b is not None and problem.b.dtype.is_floating_point:
        return f"b is {dtype_name(problem.b.dtype)}, expected integers beside zero points"
    names: tuple[Name, ...] = ("scale_b", "zero_b") if problem.zero_b is not None else ("scale_b",)
    for name in names:
        layout: Layout = getattr(problem, name)
        rows, cols = problem.scale_block(name)
        if rows < min(problem.k, LEAST_GROUP):
            return f"{name} is for groups of {rows}; expected {LEAST_GROUP} or more, as many as a step of the main loop has"
        if cols != 1:
            return f"{name} is one for all columns, expected one for each beside zero points"
        if layout.dtype != problem.dtype:
            return f"{name} is {dtype_name(layout.dtype)}, expected a's {dtype_name(problem.dtype)}, in which weights are scaled"
        if not layout.row_major or layout.alignment * layout.dtype.itemsize < ALIGNED_BYTES:
            return f"{name} has no lines across K of whole {ALIGNED_BYTES} bytes, which TMA reads"
    if problem.zero_b is not None and problem.scale_b is not None:
        scale, zero = problem.scale_b, problem.zero_b
        if (scale.size, scale.stride[0]) != (zero.size, zero.stride[0]):
            got, expected = (f"{list(x.size)} in lines of {x.stride[0]}" for x in (zero, scale))
            return f"zero_b is {got}, expected what scale_b is: {expected}"
    return None


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
