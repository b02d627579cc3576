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
TILE = 128
FEW_TERMS = 1024
ONE_BY_ONE = ((3, FEW_TERMS), (4, 4 * FEW_TERMS))
"""Tiles of TILE by TILE for each multiprocessor, below which steps of so many elements of K at most may go into a tile's sum one by
one, since torch may divide K. The largest error on an H200, over torch's: below 3 up to 0.9 of 1024 elements (1.1 in one of 118
cases), 1.4 of 2048, 2.8 of more; at 400 tiles 0.8 of 4096, 2.4 of more; from 512 on 0.2 of 512 to 32768."""
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


def why_not_one_by_one(problem: Problem, device: DeviceInfo, terms: int) -> str | None:
    """Why steps of K, of ``terms`` in all, may not go into a tile's sum one by one, or None: torch must not be more exact."""
    if device.type == "cpu":
        return None
    tiles = -(-problem.m // TILE) * -(-problem.n // TILE) * problem.batch
    most = next((most for share, most in ONE_BY_ONE if tiles < share * device.sm_count), terms)
    if terms <= most:
        return None
    reason = f"the steps of {terms} elements of K go one by one into a sum, those of {most} may where torch may divide K"
    return f"{reason}: {tiles} tiles of {TILE}x{TILE}"
