"""How good a result is, beyond being right: its error compared with that of merely rounding the true result."""

from __future__ import annotations

import math

import torch

__all__ = ["MOST", "grade"]

MOST = 1.25
"""What a kernel that accumulates in float32 stays below with 16-bit results of N(0, 1) data. Such kernels score 1.00, 16-bit
split-K partial sums 1.5–1.9, a 16-bit accumulator above 10."""


def grade(out: torch.Tensor, value: torch.Tensor) -> float:
    """rms(out − R) / rms(round(R) − R), with R = ``value`` (float64, shape of ``out``) and rounding to ``out``'s dtype.

    1 where both are zero, infinity where only the rounding error is. Tells nothing for results as wide as the accumulator, whose
    rounding error is small beside any accumulation.
    """
    actual = (out.double() - value).square().mean().sqrt().item()
    least = (value.to(out.dtype).double() - value).square().mean().sqrt().item()
    if least == 0:
        return 1.0 if actual == 0 else math.inf
    return actual / least
