"""CUTLASS kernels for groups of rows: arrays of matrices whose sizes and addresses are on the device.

Each group is a product of its rows of a with its own matrix of b. CUTLASS's grouped scheduler counts tiles while the kernel runs.
It reads group descriptions that a small kernel of ours first computes from the offsets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from ...device import DeviceInfo
from ...problem import Problem
from ...problem.dtypes import dtype_name
from ...toolchain.orientation import letter
from .operation import Operation
from .quantized import model_of
from .tiles import GROUPED, GROUPED_SWAPPED, tiled

OPERATION = "grouped_mm"
CAPABILITY = 90
"""Compute capability of these kernels."""
TRANSPOSED = {"t": "n", "n": "t"}
"""Layout letter of the transpose."""


def why_not_groups(problem: Problem, device: DeviceInfo) -> str | None:
    """Return the reason why no operation can serve a grouped problem, or None. Other problems get None."""
    if problem.op != OPERATION:
        return None
    if device.capability != CAPABILITY:
        return f"{problem.op} is served only on sm{CAPABILITY}, not on {device.arch}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"a is {dtype_name(problem.dtype)}, expected float16 or bfloat16 for groups of rows"
    for i, x in enumerate(problem.epilogue.operands if problem.epilogue else ()):
        if x.expanded(problem.out.size).stride[0]:
            return f"operand {i} of the epilogue is {x}, expected one row for all: an epilogue cannot tell which rows its group has"
    return None


def grouped_operations(problem: Problem) -> Iterator[Operation]:
    """Yield operations with rows as rows, and with rows as columns of the transpose, whose tiles suit small groups."""
    of_b = letter(problem.b) or "n"
    upright = dataclasses.replace(
        model_of(problem.a, problem.b, problem.out), grouped=True, layout_a="t", layout_b=of_b, layout_d="t"
    )
    swapped = dataclasses.replace(upright, layout_a=TRANSPOSED[of_b], layout_b="n", layout_d="n")
    for model, tiles in ((upright, GROUPED), (swapped, GROUPED_SWAPPED)):
        for op in tiled(model, tiles):
            kernel = op.kernel_schedule.replace("KernelTma", "KernelPtrArrayTma")
            epilogue = kernel.replace("gemm::Kernel", "epilogue::")
            yield dataclasses.replace(op, kernel_schedule=kernel, epilogue_schedule=epilogue, scheduler="Group")
