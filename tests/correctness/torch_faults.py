"""Faults of torch that some machines have, each found by trying, not by a processor's name: see docs/conformance.md."""

from __future__ import annotations

import functools
import math

import torch

__all__ = ["makes_nan_of_infinity"]


@functools.cache
def makes_nan_of_infinity() -> bool:
    """Whether bfloat16 products on this CPU have NaN where an infinity is the last of an odd number of terms.

    oneDNN adds two products at a time. Where AVX-512 lacks its bfloat16 extension, it multiplies the zero beside the last one with
    the infinity.
    """
    a = torch.ones(64, 3, dtype=torch.bfloat16)
    a[0, 2] = math.inf
    return bool(torch.mm(a, torch.ones(3, 64, dtype=torch.bfloat16)).isnan().any())
