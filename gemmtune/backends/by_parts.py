"""Products of float32 as bfloat16 parts: legality for every backend that computes them, and the parts of a number."""

import torch

from ..device import DeviceInfo
from ..problem import Problem
from ..problem.rules import why_not_dense

LEAST_K = 64
"""Least K. Below it torch's sums are so short that the omitted products are the larger error."""
LEAST_CAPABILITY = 80
"""First compute capability with bfloat16 tensor cores."""
TILE = 128
FEW_TERMS = 1024
ONE_BY_ONE = ((3, FEW_TERMS), (4, 4 * FEW_TERMS))
"""Limits on adding steps of K one by one: (tiles per multiprocessor, largest number of elements of K).

Each limit applies below that number of TILE × TILE tiles for each multiprocessor, because torch may split K there. Measured
on an H200, the largest error over torch's was as follows. Below 3 tiles: up to 0.9 for 1024 elements (1.1 in one of 118
cases), 1.4 for 2048, 2.8 for more. At 400 tiles in total: 0.8 for 4096, 2.4 for more. From 512 tiles on: 0.2 for 512 to
32768.
"""
_HIGH_BITS = -(2**16)
_ONE_BITS = _HIGH_BITS & ~(1 << 30)
"""Mask that turns an infinity into a 1 with its sign, and a NaN into a number."""


def parts_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return high, middle and low part as float32 numbers of eight bits, each the truncated leading bits of the remainder.

    A number that is not finite is in the low part, with a high part of ±1. A low part is multiplied only with high parts, so
    an infinity meets a 0 only where it is really multiplied with 0.
    """
    finite = x.isfinite()
    kept = torch.where(finite, _HIGH_BITS, _ONE_BITS).to(torch.int32)
    high = (x.contiguous().view(torch.int32) & kept).view(torch.float32)
    rest = x - high
    middle = torch.where(finite, (rest.view(torch.int32) & _HIGH_BITS).view(torch.float32), 0.0)
    return high, middle, rest.sub_(middle)


def why_not_parts(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why no product by parts is offered, or None. A CPU device means an interpreter or a test."""
    if (reason := why_not_dense(problem)) is not None:
        return reason
    if problem.dtype != torch.float32 or problem.precision.input_mode != "ieee":
        return f"{problem.dtype_label}: only float32 in full precision (ieee) is split into parts"
    if problem.alpha == "zero" or problem.k < LEAST_K:
        return f"K = {problem.k}: sums of fewer than {LEAST_K} terms are more exact without parts"
    if device.type != "cpu" and (device.type != "cuda" or device.capability < LEAST_CAPABILITY):
        return f"{device.arch}: no CUDA tensor cores for bfloat16"
    return None


def why_not_one_by_one(problem: Problem, device: DeviceInfo, terms: int) -> str | None:
    """Return why steps of ``terms`` elements of K may not be added one by one, or None: torch must not be more exact."""
    if device.type == "cpu":
        return None
    tiles = -(-problem.m // TILE) * -(-problem.n // TILE) * problem.batch
    most = next((most for share, most in ONE_BY_ONE if tiles < share * device.sm_count), terms)
    if terms <= most:
        return None
    reason = f"{terms} elements of K are added to one sum step by step, expected at most {most} where torch may split K"
    return f"{reason}: {tiles} tiles of {TILE}x{TILE}"
