"""Where float32 may be multiplied as bfloat16 parts, whoever does it."""

from __future__ import annotations

import torch

from ..device import DeviceInfo
from ..problem import Problem
from ..problem.rules import why_not_dense

LEAST_K = 64
"""Below, torch's own sums are so short that what is left out of the products is the larger error."""
LEAST_CAPABILITY = 80
"""The first with bfloat16 tensor cores."""


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
