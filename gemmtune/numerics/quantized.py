"""Meaning of the stored operands of quantized operations: numbers from bytes, and the scale of each element.

Element [i, k] of a is a[i, k] · scale_a. Element [k, j] of b is (b[k, j] − zero_b) · scale_b. Scales and zero points have
one element in total, or a 2-D shape with one element for each block of the operand.
"""

import math
from typing import Literal

import torch

from ..problem import Problem
from ..problem.dtypes import dtype_info
from ..problem.operations import Encoding
from ..problem.scales import GROUPS
from .operands import Operands

_RANGES: dict[Encoding, tuple[int, int]] = {"int4": (-8, 7), "uint4": (0, 15)}


def number_range(problem: Problem) -> tuple[int, int]:
    """Return the least and the largest integer that b's numbers can be; a float dtype has every one between them."""
    if problem.encoding:
        return _RANGES[problem.encoding]
    info = dtype_info(problem.b.dtype)
    if info.is_integer:
        bounds = torch.iinfo(problem.b.dtype)
        return bounds.min, bounds.max
    return -info.exact_integer, info.exact_integer


def numbers(stored: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """Return b's numbers [.., K, N], int8, from bytes [.., K/2, N], or b unchanged without an encoding."""
    if not encoding:
        return stored
    both = torch.stack([stored & 15, stored >> 4], dim=-2).flatten(-3, -2)
    return _signed(both.to(torch.int8), encoding)


def gathered_numbers(stored: torch.Tensor, encoding: Encoding, index: torch.Tensor) -> torch.Tensor:
    """Return rows ``index`` [r] of the numbers of ``stored`` [.., K or K/2, N]."""
    if not encoding:
        return stored.index_select(-2, index)
    rows = stored.index_select(-2, index // 2)
    upper = (index % 2 == 1).unsqueeze(-1)
    return _signed(torch.where(upper, rows >> 4, rows & 15).to(torch.int8), encoding)


def packed(values: torch.Tensor) -> torch.Tensor:
    """Pack integers [.., K, N] into bytes [.., K/2, N], even k in the low four bits. Higher bits are discarded."""
    bits = values.to(torch.int32) & 15
    return (bits[..., ::2, :] | (bits[..., 1::2, :] << 4)).to(torch.uint8)


def _signed(bits: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    return (bits ^ 8) - 8 if encoding == "int4" else bits


def scale_at(scale: torch.Tensor, size: tuple[int, int], rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """Return the scales (or zero points) of the elements [rows, cols] of an operand of ``size``, float64.

    ``rows`` and ``cols`` are indices that broadcast. The result has size 1 along a dimension whose elements share a scale.
    """
    if scale.numel() == 1:
        return scale.double().reshape(())
    first, second = (
        lines.new_zeros((1,) * lines.dim()) if count == 1 else lines // _block(count, extent)
        for count, extent, lines in zip(scale.shape, size, (rows, cols), strict=True)
    )
    return scale[first, second].double()


def _block(count: int, extent: int) -> int:
    """Return the lines that share one of ``count`` scales, as ``Problem.scale_block`` does: legal blocks differ in shape."""
    return next(block for block in (1, *GROUPS) if -(-extent // block) == count)


def dequantized_a(operands: Operands, stored: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (a · scale_a, its magnitude) in float64 for the given rows [B, r, K] of a, numbered by ``rows`` [r]."""
    value = stored.double()
    if operands.scale_a is not None:
        size = (operands.a.shape[-2], operands.a.shape[-1])
        cols = torch.arange(size[1], device=stored.device)
        value = value * scale_at(operands.scale_a, size, rows.unsqueeze(-1), cols.unsqueeze(0))
    return value, value.abs()


def dequantized_b(operands: Operands, stored: torch.Tensor, cols: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ((b − zero_b) · scale_b, its magnitude) in float64 for the given columns of b, numbered by ``cols`` [c].

    The columns are [B, K or K/2, c]. The magnitude is (|b| + |zero_b|) · |scale_b|, which a kernel that applies zero points
    to sums has to round.
    """
    value = numbers(stored, operands.encoding).double()
    magnitude = value.abs()
    size = (operands.a.shape[-1], operands.b.shape[-1])
    rows, cols = torch.arange(size[0], device=stored.device).unsqueeze(-1), cols.unsqueeze(0)
    if operands.zero_b is not None:
        zero = scale_at(operands.zero_b, size, rows, cols)
        value, magnitude = value - zero, magnitude.add_(zero.abs())
    if operands.scale_b is not None:
        scale = scale_at(operands.scale_b, size, rows, cols)
        value, magnitude = value * scale, magnitude.mul_(scale.abs())
    return value, magnitude


def blocks_of_k(problem: Problem) -> int:
    """Return the number of parts into which the scales and zero points divide K, or 1 if none changes along it."""
    return max(1, *_blocks_of_k(problem, ("scale_a", "scale_b", "zero_b")))


def scales_along_k(problem: Problem) -> int:
    """Return how many of the two scales change along K."""
    return sum(blocks > 1 for blocks in _blocks_of_k(problem, ("scale_a", "scale_b")))


def _blocks_of_k(problem: Problem, names: tuple[Literal["scale_a", "scale_b", "zero_b"], ...]) -> list[int]:
    """Return the number of blocks along K of each named operand, 0 for absent ones."""
    lengths = [problem.scale_block(x)[1 if x == "scale_a" else 0] if getattr(problem, x) is not None else 0 for x in names]
    return [-(-problem.k // length) if length else 0 for length in lengths]


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
    return 1, 1, limit / (4 * max(half, 1) * (1 + added))


def most_factor(k: int, dtype: torch.dtype) -> int:
    """Return the largest f, at most that of the dtype, for which K products of integers −f − 1 … f add up within int32."""
    largest = int(dtype_info(torch.int32).largest)
    return min(int(dtype_info(dtype).largest), math.isqrt(largest // max(k, 1)) - 1)
