"""Ranges of the integers in probes: exact in the operands, with sums exact in the accumulator and results exact in out."""

from __future__ import annotations

import math

import torch

from ..problem import Problem
from ..problem.dtypes import dtype_info
from .quantized import number_range

MOST_INTEGER = 31
"""Largest integer in a and b of the cancelling probe. 16 bits hold it, and bfloat16 its result (2·31 + 3·9)."""
MOST_INTEGERS: dict[torch.dtype, int] = {
    torch.float64: 2**20, torch.int8: 126, torch.float8_e4m3fn: 15, torch.float8_e5m2: 7, torch.float8_e4m3fnuz: 15,
    torch.float8_e5m2fnuz: 7,
}  # fmt: skip
"""Same limit for other dtypes, where one more is exact. float64 and int8 get integers whose sums float32 cannot hold."""
MOST_ADDED = 9
"""Largest integer in inp."""
MOST_ZERO = 3
"""Largest zero point of sums that cancel."""
SUM_BITS = 50


def cancelling_range(limit: int, half: int, problem: Problem) -> tuple[int, int, float]:
    """Return (largest integer of a, largest integer of b − zero_b, share of nonzero products).

    They keep sums of ``half`` products below ``limit``. Sums of a · b and of a · zero_b stay below it too, because zero
    points may be applied to sums.
    """
    first, second = (MOST_INTEGERS.get(layout.dtype, MOST_INTEGER) for layout in (problem.a, problem.b))
    both = min(first, second)
    added = 0 if problem.zero_b is None else 2 * MOST_ZERO
    of_b = min(both, number_range(problem)[1] - added // 2) if problem.widens_b else both
    room = min(limit, 2**SUM_BITS) / max(half, 1)
    fitting = int(math.sqrt(room + added**2 / 4) - added / 2)  # f · (f + added) = room
    if fitting >= 1:
        return min(both, max(fitting, int(room / (of_b + added)))), min(of_b, fitting), 1.0
    return 1, 1, limit / (4 * half * (1 + added))


def most_factor(k: int, dtype: torch.dtype) -> int:
    """Return the largest f, at most that of the dtype, for which K products of integers −f − 1 … f add up within int32."""
    largest = int(dtype_info(torch.int32).largest)
    return min(int(dtype_info(dtype).largest), math.isqrt(largest // max(k, 1)) - 1)
