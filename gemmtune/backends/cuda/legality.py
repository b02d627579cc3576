"""What is legal, as far as every family asks the same."""

from __future__ import annotations

import torch

from ...device import DeviceInfo
from ...problem import Problem
from ...problem.dtypes import dtype_name
from ...toolchain.launch import MOST_OPERANDS
from .hopper import CAPABILITY

__all__ = ["INT32_LIMIT", "why_not_epilogue", "why_not_here"]

INT32_LIMIT = 2**31
FACTORS = (torch.bfloat16, torch.float16)
"""Dtypes that are multiplied."""
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that are stored, and that an epilogue reads."""


def why_not_here(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no kernel of ours serves the device, or the dtypes of a and of the result; or None."""
    if device.type != "cuda" or device.capability != CAPABILITY:
        return f"works on CUDA devices of compute capability 9.0, not on {device.arch}"
    if problem.dtype not in FACTORS:
        return f"a is {dtype_name(problem.dtype)}, expected bfloat16 or float16"
    if problem.out.dtype not in RESULTS:
        return f"the result is {dtype_name(problem.out.dtype)}, expected one of {', '.join(map(dtype_name, RESULTS))}"
    if problem.empty or problem.k == 0:
        return "the product is empty: nothing is launched"
    if max(problem.m, problem.n, problem.k, problem.batch) >= INT32_LIMIT:
        return "a size does not fit 32 bits"
    return None


def why_not_epilogue(problem: Problem) -> str | None:
    """Why the epilogue cannot be expressed, or None."""
    if problem.epilogue is None:
        return None
    operands, most = problem.epilogue.operands, MOST_OPERANDS - (problem.inp_read is not None) - len(problem.scales)
    if len(operands) > most:
        return f"the epilogue has {len(operands)} operands, a launch passes at most {most}"
    for i, x in enumerate(operands):
        if x.dtype not in RESULTS:
            return f"operand {i} of the epilogue is {dtype_name(x.dtype)}, expected one of {', '.join(map(dtype_name, RESULTS))}"
    if any(node.dtype == torch.float64 for node in problem.epilogue.nodes):
        return "the epilogue computes in float64, this backend in float32"
    return None
