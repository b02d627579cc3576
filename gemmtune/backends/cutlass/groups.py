"""Groups of rows: CUTLASS's kernels for arrays of matrices, whose sizes and addresses are on the device.

Each group is a product of its own, of rows of a with a matrix of b. The kernels have the scheduler of groups, which counts their
tiles as it goes; what it reads of each group is made of the offsets by a kernel of ours that runs first.
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
"""The compute capability of these kernels."""
TURNED = {"t": "n", "n": "t"}
"""The layout of the transpose."""


def why_not_groups(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no operation can serve a grouped problem; None where one may, and for every other problem."""
    if problem.op != OPERATION:
        return None
    if device.capability != CAPABILITY:
        return f"{problem.op} is served on sm{CAPABILITY} alone, not on {device.arch}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"a is {dtype_name(problem.dtype)}, expected float16 or bfloat16 for groups of rows"
    for i, x in enumerate(problem.epilogue.operands if problem.epilogue else ()):
        if x.expanded(problem.out.size).stride[0]:
            return f"operand {i} of the epilogue is {x}, expected one row for all: a group's epilogue knows no row but its own"
    return None


def grouped_operations(problem: Problem) -> Iterator[Operation]:
    """Rows as they are; and as columns of the transpose, which few of them fill."""
    of_b = letter(problem.b) or "n"
    upright = dataclasses.replace(
        model_of(problem.a, problem.b, problem.out), grouped=True, layout_a="t", layout_b=of_b, layout_d="t"
    )
    swapped = dataclasses.replace(upright, layout_a=TURNED[of_b], layout_b="n", layout_d="n")
    for model, tiles in ((upright, GROUPED), (swapped, GROUPED_SWAPPED)):
        for op in tiled(model, tiles):
            kernel = op.kernel_schedule.replace("KernelTma", "KernelPtrArrayTma")
            epilogue = kernel.replace("gemm::Kernel", "epilogue::")
            yield dataclasses.replace(op, kernel_schedule=kernel, epilogue_schedule=epilogue, scheduler="Group")
