"""Products of float32 as bfloat16 parts: where they are allowed, whoever computes them, and what the parts of a number are."""

from __future__ import annotations

import torch

from ..device import DeviceInfo
from ..problem import Problem
from ..problem.rules import why_not_dense

LEAST_K = 64
"""Below, torch's own sums are so short that what is left out of the products is the larger error."""
LEAST_CAPABILITY = 80
"""The first with bfloat16 tensor cores."""
_HIGH_BITS = -(2**16)
_ONE_BITS = _HIGH_BITS & ~(1 << 30)
"""What these leave of an infinity is a 1 with its sign, of a NaN a number."""


def parts_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """High, middle and low part as float32 numbers of eight bits: the leading ones of what is left, cut off.

    What is not finite is in the low part beside a high part of ±1: a low part is multiplied with a high one alone, and an infinity
    then meets no 0 but one that it is really multiplied with.
    """
    finite = x.isfinite()
    kept = torch.where(finite, _HIGH_BITS, _ONE_BITS).to(torch.int32)
    high = (x.contiguous().view(torch.int32) & kept).view(torch.float32)
    rest = x - high
    middle = torch.where(finite, (rest.view(torch.int32) & _HIGH_BITS).view(torch.float32), 0.0)
    return high, middle, rest.sub_(middle)


def why_not_parts(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no product by parts is offered, or None; a CPU stands for an interpreter, or for tests."""
    reason = why_not_dense(problem)
    if reason is not None:
        return reason
    if problem.dtype != torch.float32 or problem.precision.input_mode != "ieee":
        return f"{problem.dtype_label}: float32 that torch multiplies as it is has parts"
    if problem.alpha == "zero" or problem.k < LEAST_K:
        return f"K = {problem.k}: sums of fewer than {LEAST_K} terms are more exact without parts"
    if device.type != "cpu" and (device.type != "cuda" or device.capability < LEAST_CAPABILITY):
        return f"{device.arch}: no tensor cores of CUDA that multiply bfloat16"
    return None
