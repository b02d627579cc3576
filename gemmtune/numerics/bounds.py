"""The error that a right kernel may have before its result is rounded to the output type: E = relative · S + absolute.

With υ the roundoff of the accumulator, n additions and multiplications on the way of any product into the result, and S as in
reference.py, floating-point sums in **any** order obey |computed − R| ≤ ((1 + υ)^n − 1)·S (Higham, "Accuracy and Stability of
Numerical Algorithms", §3.1 and §4.2). Products of 16-bit inputs are exact; a block FMA of width b adds at most ⌈K/b⌉ roundings
(Blanchard, Higham, Lopez, Mary, Pranesh, SIAM J. Sci. Comput. 42, 2020). Tensor cores truncate, which doubles υ. The assembly of
the constants is ours and conservative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import GemmtuneError
from ..problem import Problem
from ..problem.dtypes import dtype_info

__all__ = ["INPUT_ERROR", "Arithmetic", "Bound", "accumulation_bound", "exact_limit", "underflow"]

INPUT_ERROR: dict[str, float] = {"ieee": 0.0, "tf32": 2.0**-10}
"""Largest relative error of reading one input. tf32 keeps 11 significand bits; hardware may cut off the rest, not round."""

NARROWEST_BLOCK = 4
"""Elements that a matrix instruction multiplies and adds at a time, at the least (SM75)."""
SCALAR_OPERATIONS = 3
"""alpha ·, beta ·, +."""


class Arithmetic(Protocol):
    """What the bound depends on besides the problem; ``Claims`` is one of these, and says what the fields mean."""

    @property
    def accumulate(self) -> torch.dtype: ...
    @property
    def partials(self) -> torch.dtype: ...
    @property
    def epilogue_input(self) -> torch.dtype: ...
    @property
    def splits(self) -> int: ...
    @property
    def input_mode(self) -> str: ...
    @property
    def flush_subnormals(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """E = relative · S + absolute."""

    relative: float
    absolute: float

    def __call__(self, magnitude: torch.Tensor) -> torch.Tensor:
        """E for S = ``magnitude``."""
        return magnitude * self.relative + self.absolute


def underflow(dtype: torch.dtype, *, flush: bool) -> float:
    """The largest absolute error that a result near zero adds to the relative one."""
    info = dtype_info(dtype)
    return info.smallest_normal if flush else info.smallest_subnormal / 2


def accumulation_bound(
    problem: Problem,
    arithmetic: Arithmetic,
    *,
    alpha: float,
    largest: Callable[[], float] = lambda: 0.0,
    extended: bool = False,
) -> Bound:
    """E for alpha · a @ b + beta · inp, with the rounding to ``epilogue_input`` but not the one to the output type.

    ``largest`` gives max|a| + max|b|, asked only where subnormal inputs may be read as 0. ``extended`` says that R is better than a
    float64 product, whose error would otherwise count too.

    Raises:
        GemmtuneError: an input mode of which nothing is known.
    """
    if arithmetic.input_mode not in INPUT_ERROR:
        raise GemmtuneError(f"input_mode: got {arithmetic.input_mode!r}, expected one of {', '.join(INPUT_ERROR)}")
    k, splits, flush = problem.k, arithmetic.splits, arithmetic.flush_subnormals
    steps = k + math.ceil(k / NARROWEST_BLOCK) + splits + SCALAR_OPERATIONS
    relative = _growth(steps * _accumulator_roundoff(problem, arithmetic))
    if not extended:
        relative += _growth((k + SCALAR_OPERATIONS) * 2.0**-53)
    reading = INPUT_ERROR[arithmetic.input_mode]
    relative += (1 + relative) * (2 * reading + reading**2)
    absolute = steps * underflow(arithmetic.accumulate, flush=flush)
    if arithmetic.partials != arithmetic.accumulate:
        relative += (1 + relative) * _growth((splits + 1) * dtype_info(arithmetic.partials).unit_roundoff)
        absolute += (splits + 1) * underflow(arithmetic.partials, flush=flush)
    if flush and k:
        absolute += k * largest() * dtype_info(problem.dtype).smallest_normal
    absolute *= max(1.0, abs(alpha)) * (1 + relative)
    before = dtype_info(arithmetic.epilogue_input)
    if before.unit_roundoff > dtype_info(problem.accumulator).unit_roundoff:
        relative += (1 + relative) * before.unit_roundoff
        absolute += underflow(before.dtype, flush=flush)
    return Bound(relative=relative, absolute=absolute)


def _growth(x: float) -> float:
    """(1 + u)^n − 1 for n·u = x, from above."""
    return math.expm1(min(x, 600.0))


def _accumulator_roundoff(problem: Problem, arithmetic: Arithmetic) -> float:
    """υ: the roundoff of the accumulator, doubled where tensor cores truncate to float32."""
    roundoff = dtype_info(arithmetic.accumulate).unit_roundoff
    matrix_unit = problem.dtype.itemsize == 2 or arithmetic.input_mode != "ieee"
    truncates = problem.device_type != "cpu" and matrix_unit and arithmetic.accumulate == torch.float32
    return 2 * roundoff if truncates else roundoff


def exact_limit(problem: Problem, arithmetic: Arithmetic) -> int:
    """Sums of integers up to this magnitude are exact in every number that the kernel holds on the way."""
    held = (problem.accumulator, arithmetic.accumulate, arithmetic.partials)
    return min(dtype_info(dtype).exact_integer for dtype in held) // 2  # a bit in reserve for alpha
