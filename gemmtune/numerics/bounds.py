"""Error that a correct kernel may have before its result is rounded to the output type: E = relative · S + absolute.

υ is the unit roundoff of the accumulator, and n the additions and multiplications that any product passes through. S is that
of reference.py. Floating-point sums in **any** order obey |computed − R| ≤ ((1 + υ)^n − 1)·S (Higham, "Accuracy and Stability
of Numerical Algorithms", §3.1 and §4.2). Products of 16-bit inputs are exact. A block FMA of width b adds at most ⌈K/b⌉
roundings (Blanchard, Higham, Lopez, Mary, Pranesh, SIAM J. Sci. Comput. 42, 2020). Tensor cores truncate, which doubles υ.

8-bit floats: Hopper's tensor cores keep 14 significand bits of a sum, relative to the largest number that enters it. Each
number therefore costs up to 2^-13·S. Without ``fast_accum`` such sums are added to a float32 sum every 128 elements of K.
Sums of int8 are exact, and an epilogue gets them rounded to float32.

Scales and zero points: S = (|a|·scale_a) @ ((|b| + |zero_b|)·scale_b). A kernel multiplies either the terms of a sum by the
scales or, block by block along K, the sums. Each product then passes one multiplication by each scale. It passes one addition
for each block, in addition to the additions within its block. A kernel may subtract zero points from b. It may also subtract
multiples of sums of a from sums of a · b. The same counts then hold for a · zero_b. ``weights`` = w is the type to which
weights may be rounded before they are multiplied. Subtraction and multiplication may each be rounded so, which adds (1 +
u_w)² − 1. Each of the K weights also adds half the smallest subnormal of w times max|a|. 8-bit integers and floats are exact
in every w.

float32 by parts: six products replace each one, and their sums are promoted every few elements of K. A part below 2^-133 is
lost. That is less than a subnormal number read as 0, and happens to numbers below 2^-110.

The sum of two products has the K + K2 products of both. If one of them is rounded before the other is added, it is a partial
sum.

We assembled the constants ourselves, conservatively.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import GemmtuneError
from ..problem import Problem
from ..problem.dtypes import dtype_info
from .operands import SCALES
from .quantized import blocks_of_k
from .reduction import Reduction

INPUT_ERROR: dict[str, float] = {"ieee": 0.0, "parts": 2.0**-22, "tf32": 2.0**-10}
"""Largest relative error of reading one input.

tf32 keeps 11 significand bits, and hardware may truncate the rest. Parts of 8 bits each lose no bit. The products of
middle and low parts are left out, three of nine. Each is below 2^-22 of the whole product, equivalent to reading both
inputs with that error.
"""
PRODUCTS_OF_PARTS = 6
SMALL_PARTS = 2.0**-6 * 1.02
"""Sum of the five products that have a lower part, relative to the whole product."""
LOSES_PARTS = 2.0**16
"""Multiple of the smallest normal number below which float32 has parts that no bfloat16 holds."""

NARROWEST_BLOCK = 4
"""Smallest number of elements that a matrix instruction multiplies and adds at a time (SM75)."""
SCALAR_OPERATIONS = 3
"""Operations of alpha ·, beta · and +, or of scale_a ·, scale_b · and − zero_b."""
FLOAT8_BITS = 14
"""Significand bits of the sums of 8-bit floats on SM90, the fewest of any GPU (PyTorch's notes on ``use_fast_accum``)."""
PROMOTED_EVERY = 128
"""Elements of K after which such a sum is added to a float32 sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Arithmetic that a kernel states for itself. Verification holds it to exactly this.

    ``accumulate`` is the type of the running sum. ``partials`` is the type in which partial sums are stored. They come from
    split-K, or from one of two products that is rounded before the other is added. ``splits`` is the largest number of partial
    sums. ``epilogue_input`` is the type to which the accumulator is rounded before the epilogue. ``partials`` and
    ``epilogue_input`` default to ``accumulate``. ``accumulator_bits`` is the number of significand bits of the running sum if a
    matrix unit keeps fewer than its type. None means the bits of the type. On a GPU, 8-bit floats then get the bits of the
    narrowest unit.
    """

    accumulate: torch.dtype
    partials: torch.dtype = None  # type: ignore[assignment]
    epilogue_input: torch.dtype = None  # type: ignore[assignment]
    splits: int = 1
    weights: torch.dtype | None = None
    """Dtype to which a kernel rounds (b − zero_b) · scale_b before it multiplies; None scales the sums instead."""
    input_mode: str = "ieee"
    flush_subnormals: bool = False
    deterministic: bool = True
    accumulator_bits: int | None = None
    promoted_every: int | None = None
    """Elements of K after which the sum of a matrix unit, which may truncate, is added to a sum that rounds to nearest."""
    skips_zeros: bool = False
    """Permission to leave out products with a zero: where 0 · NaN or 0 · ∞ matters, the result may be anything."""
    skips_absent: bool = False
    """Promise to leave out products with absent blocks of b, so that a NaN or an infinity of a does not show there."""
    reduction: Reduction | None = None
    """Order of summation, if the kernel knows it. Kernels with equal reductions give a row equal bits, for every M."""

    def __post_init__(self) -> None:
        for name in ("partials", "epilogue_input"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.accumulate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """E = relative · S + absolute."""

    relative: float | torch.Tensor
    absolute: float | torch.Tensor
    """Each is a number, or float64 [N] if it differs from column to column."""

    def __call__(self, magnitude: torch.Tensor) -> torch.Tensor:
        """E for S = ``magnitude``."""
        return magnitude * self.relative + self.absolute


def underflow(dtype: torch.dtype, *, flush: bool) -> float:
    """Return the largest absolute error that a result near zero adds to the relative error."""
    info = dtype_info(dtype)
    return info.smallest_normal if flush else info.smallest_subnormal / 2


def accumulation_bound(
    problem: Problem,
    claims: Claims,
    *,
    alpha: float,
    largest: Callable[[], float] = lambda: 0.0,
    extended: bool = False,
    terms: int | None = None,
) -> Bound:
    """Return E for alpha · a @ b + beta · inp, or a @ b + c @ d. Raises GemmtuneError for an unknown input mode.

    E includes the rounding to ``epilogue_input`` but not the rounding to out's type. ``largest`` returns max|a| + max|b|, where
    each counts only if the other operand has subnormal numbers (``Operands.beside_subnormal``). It is called only if such numbers
    may be read as 0 or weights may become subnormal. ``extended`` states that R is better than a float64 product, whose error
    counts otherwise. With scales, ``alpha`` is 1 and scales are at most SCALES[1]. ``terms`` limits the nonzero products of a sum.
    """
    if claims.input_mode not in INPUT_ERROR:
        raise GemmtuneError(f"input_mode: got {claims.input_mode!r}, expected one of {', '.join(INPUT_ERROR)}")
    k, splits, flush = problem.terms if terms is None else terms, claims.splits, claims.flush_subnormals
    steps = _operations(k) + splits + _last_operations(problem)
    relative = _accumulation(problem, claims, k)
    if not extended and not dtype_info(problem.dtype).is_integer:
        relative += _growth((k + SCALAR_OPERATIONS) * 2.0**-53)
    reading = INPUT_ERROR[claims.input_mode]
    relative += (1 + relative) * (2 * reading + reading**2)
    absolute = steps * underflow(claims.accumulate, flush=flush)
    if claims.partials != claims.accumulate:
        relative += (1 + relative) * _growth((splits + 1) * dtype_info(claims.partials).unit_roundoff)
        absolute += (splits + 1) * underflow(claims.partials, flush=flush)
    if flush and k:
        # Weights are read as numbers of a's type.
        read = (problem.a.dtype,) if problem.widens_b else (problem.a.dtype, problem.b.dtype)
        absolute += k * largest() * max(dtype_info(dtype).smallest_normal for dtype in read)
    if claims.weights is not None and problem.scale_b is not None:
        relative += (1 + relative) * _growth(2 * dtype_info(claims.weights).unit_roundoff)
        absolute += k * largest() * underflow(claims.weights, flush=flush) if k else 0.0
    absolute *= max(1.0, abs(alpha)) * SCALES[1] ** len(problem.scales) * (1 + relative)
    before = dtype_info(epilogue_input(problem, claims))
    if before.unit_roundoff > dtype_info(problem.accumulator).unit_roundoff:
        relative += (1 + relative) * before.unit_roundoff
        absolute += underflow(before.dtype, flush=flush)
    return Bound(relative=relative, absolute=absolute)


def epilogue_input(problem: Problem, claims: Claims) -> torch.dtype:
    """Return the type of the epilogue's input: the claimed type, or float32 for integer sums that a function follows."""
    claimed = claims.epilogue_input
    return problem.epilogue_dtype if problem.epilogue is not None and dtype_info(claimed).is_integer else claimed


def _growth(x: float) -> float:
    """Return an upper bound of (1 + u)^n − 1 for n·u = x."""
    return math.expm1(min(x, 600.0))


def _operations(k: int) -> int:
    """Return the number of additions and multiplications that a product passes on its way into a sum of ``k``."""
    return k + math.ceil(k / NARROWEST_BLOCK)


def _last_operations(problem: Problem) -> int:
    """Return the number of operations after one block's sum: additions of separately scaled blocks, and multiplications."""
    blocks = blocks_of_k(problem)
    return SCALAR_OPERATIONS + (blocks + 1 if blocks > 1 else 0)


def _accumulation(problem: Problem, claims: Claims, k: int) -> float:
    """Return the relative part of the bound for summing ``k`` products and applying alpha, beta or scales."""
    roundoff = dtype_info(claims.accumulate).unit_roundoff
    truncating = 2 * roundoff if _truncates(problem, claims) else roundoff
    last = claims.splits + _last_operations(problem)
    bits = _accumulator_bits(problem, claims)
    # The small products come first. The last sum continues from them or is added to them in pieces.
    small = SMALL_PARTS * _growth(_operations(k) * PRODUCTS_OF_PARTS * truncating) if claims.input_mode == "parts" else 0.0
    if bits is None and claims.promoted_every is not None:
        chunk = min(k, claims.promoted_every)
        return small + _growth(_operations(chunk) * truncating + (math.ceil(k / chunk if chunk else 0) + last) * roundoff)
    if bits is None:
        return small + _growth((_operations(k) + last) * truncating)
    narrow = 2.0 ** (1 - bits) if _truncates(problem, claims) else 2.0**-bits
    if not problem.float8 or problem.fast_accum:
        return _growth(_operations(k) * narrow + last * truncating)
    chunk = min(k, PROMOTED_EVERY)
    return _growth(_operations(chunk) * narrow + (math.ceil(k / PROMOTED_EVERY) + last) * truncating)


def _truncates(problem: Problem, claims: Claims) -> bool:
    """Return True if tensor cores may sum in float32, where they truncate instead of rounding."""
    matrix_unit = problem.dtype != torch.float32 or claims.input_mode != "ieee"
    return problem.device_type != "cpu" and matrix_unit and claims.accumulate == torch.float32


def _accumulator_bits(problem: Problem, claims: Claims) -> int | None:
    """Return the significand bits of the running sum if it has fewer than its type, else None."""
    bits = claims.accumulator_bits
    if bits is None and problem.float8 and problem.device_type != "cpu":
        bits = FLOAT8_BITS
    return bits if bits is not None and 2**bits < dtype_info(claims.accumulate).exact_integer else None


def exact_limit(problem: Problem, claims: Claims) -> int:
    """Return the magnitude up to which sums of integers are exact in every number that the kernel holds."""
    held = (problem.accumulator, claims.accumulate, claims.partials)
    limits = [dtype_info(dtype).exact_integer for dtype in held]
    bits = _accumulator_bits(problem, claims)
    limits += [2**bits] if bits is not None else []
    return min(limits) // 2  # a bit in reserve for alpha
