"""Faults of torch that some machines have, each found by trying, not by a processor's name: see docs/conformance.md."""

from __future__ import annotations

import functools
import math

import torch

__all__ = ["drops_beta_in_float16", "makes_nan_of_infinity"]


@functools.cache
def makes_nan_of_infinity() -> bool:
    """Whether bfloat16 products on this CPU have NaN for an infinity that is the last of an odd K, or in the next row.

    oneDNN adds two products at a time. Where AVX-512 lacks its bfloat16 extension, it multiplies the zero beside the last one with
    the infinity. With AMX, oneDNN 3.10 multiplies the first numbers of the next row by zeros, if a block of K has one or two terms.
    """
    for m, k, place in ((64, 3, (0, 2)), (33, 129, (1, 0))):
        a = torch.ones(m, k, dtype=torch.bfloat16)
        a[place] = math.inf
        if torch.mm(a, torch.ones(k, 64, dtype=torch.bfloat16)).isnan().any():
            return True
    return False


@functools.cache
def drops_beta_in_float16() -> bool:
    """Whether float16 products of this CPU ignore beta if alpha is 0, as bfloat16 ones do on all."""
    added, a, b = (torch.ones(2, 64, 64, dtype=torch.float16) for _ in range(3))
    return not torch.equal(torch.baddbmm(added, a, b, alpha=0, beta=3), 3 * added)
