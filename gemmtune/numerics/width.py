"""Rows of a and a column of b whose products show the width of the accumulator.

Along K, a row has a window. A large number comes first and its opposite last, at even places. Small equal ones lie at odd
places between them. The large ones cancel, and the remaining sum counts the small ones, unless some were lost next to a large
one. Windows have several lengths, so that sums over a part of K hold a large number too, in any order of the parts.
"""

import math
from dataclasses import dataclass

import torch

from ..problem import Problem
from ..problem.dtypes import dtype_info
from .quantized import number_range, scales_along_k

LEAST_K = 3
MOST_ROWS = 64
LEAST_WINDOW = 16
MOST_SMALL = 100
"""Small products in one row: their sum, twice that and 27 are exact even in bfloat16."""
UNDONE_BITS = 2
_GOLDEN = (math.sqrt(5) - 1) / 2
"""Golden ratio, whose multiples modulo 1 spread the starts of the windows evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthRows:
    """``rows`` [R, K] of a and ``col`` [K] of b, on the CPU in float64, but exact in their dtypes.

    The product of row i and ``col`` is ``factor[i] · col[index[i]]``, where ``index`` is an odd place.
    """

    rows: torch.Tensor
    col: torch.Tensor
    factor: torch.Tensor
    index: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """Factors of large and small products, for a and for b. ``times`` large products fit the accumulator."""

    large: tuple[float, float]
    small: tuple[float, float]
    times: int


def width_rows(rows: int, k: int, limit: int, problem: Problem) -> WidthRows:
    """Return rows for K of at least LEAST_K whose sums of products stay within ``limit`` small products.

    For each scale that changes along K, a may be multiplied by 4 or 1/4 (``Scaling.undo``).
    """
    most_small = min(MOST_SMALL, limit // 4)
    numbers = (_integers if problem.integers else _floats)(limit - most_small, problem)
    count = min(rows, MOST_ROWS)
    lengths = [k, *(k >> shift for shift in range(1, k.bit_length()) if k >> shift >= LEAST_WINDOW)]
    matrix = torch.zeros(count, k, dtype=torch.float64, device="cpu")
    factor, index = torch.zeros(count, dtype=torch.float64, device="cpu"), torch.zeros(count, dtype=torch.int64, device="cpu")
    for i, row in enumerate(matrix):
        length = lengths[i % len(lengths)]
        begin = 2 * int(i * _GOLDEN % 1 * ((k - length) // 2 + 1))
        window = row[begin : begin + length]
        even, odd = window[::2], window[1::2]
        times = min(numbers.times, len(even) // 2)
        even[:times] = numbers.large[0]
        even[-times:] = -numbers.large[0]
        odd[:: math.ceil(len(odd) / most_small)] = numbers.small[0]
        small = int((odd != 0).sum())
        factor[i], index[i] = small * numbers.small[0], begin + 1
    col = torch.full((k,), numbers.small[1], dtype=torch.float64, device="cpu")
    col[::2] = numbers.large[1]
    return WidthRows(rows=matrix, col=col, factor=factor, index=index)


def _integers(room: int, problem: Problem) -> _Numbers:
    large = min(*(int(dtype_info(x.dtype).largest) for x in (problem.a, problem.b)), math.isqrt(room))
    return _Numbers(large=(large, large), small=(1, 1), times=room // large**2)


def _floats(room: int, problem: Problem) -> _Numbers:
    """Return powers of two: one large product, 2^``total`` times the small ones. The least integer weight is 1."""
    total = room.bit_length() - 1
    infos = dtype_info(problem.dtype), dtype_info(problem.b.dtype)
    most_a, most_b = (_exponent(info.largest) for info in infos)
    undone = scales_along_k(problem) * UNDONE_BITS
    most_a -= undone
    first = (total + 1) // 2
    if undone:
        first = min(first, most_a - undone - _exponent(infos[0].smallest_subnormal))
    if problem.widens_b and infos[1].is_integer:
        most_b = _exponent(number_range(problem)[1])
        first = max(first, total - most_b)
    halves = (first, total - first)
    tops = [min(half, most) for half, most in zip(halves, (most_a, most_b), strict=True)]
    return _Numbers(
        large=(2.0 ** tops[0], 2.0 ** tops[1]),
        small=(2.0 ** (tops[0] - halves[0]), 2.0 ** (tops[1] - halves[1])),
        times=1,
    )


def _exponent(x: float) -> int:
    """Return the exponent of the largest power of two up to ``x``."""
    return math.frexp(x)[1] - 1
