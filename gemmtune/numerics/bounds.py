"""The error that a right kernel may have before its result is rounded to the output type: E = relative · S + absolute.

With υ the roundoff of the accumulator, n additions and multiplications on the way of any product into the result, and S as in
reference.py, floating-point sums in **any** order obey |computed − R| ≤ ((1 + υ)^n − 1)·S (Higham, "Accuracy and Stability of
Numerical Algorithms", §3.1 and §4.2). Products of 16-bit inputs are exact; a block FMA of width b adds at most ⌈K/b⌉ roundings
(Blanchard, Higham, Lopez, Mary, Pranesh, SIAM J. Sci. Comput. 42, 2020). Tensor cores truncate, which doubles υ.

8-bit floats: the tensor cores of Hopper keep 14 significand bits of a sum, relative to the largest number that goes into it; each
number therefore costs up to 2^-13·S. Without ``fast_accum`` such sums go into a float32 one every 128 elements of K. Sums of int8
are exact, and an epilogue gets them rounded to float32.

Scales and zero points: S = (|a|·scale_a) @ ((|b| + |zero_b|)·scale_b). A kernel multiplies the terms of a sum or, block for block
along K, sums: a product then meets one multiplication by each scale, and an addition for each block besides those within its block.
Zero points are subtracted from b, or their multiples of sums of a from sums of a · b: the same counts hold for a · zero_b. Where
weights are rounded to ``weights`` = w before they are multiplied, subtraction and multiplication may each be rounded so, which adds
(1 + u_w)² − 1, and for each of the K weights half the smallest subnormal of w times max|a|. 8-bit integers and floats are exact in
every w.

float32 by parts: six products for each one, whose sums are promoted every few elements of K. A part below 2^-133 is lost, which is
less than a subnormal number read as 0, and happens to numbers below 2^-110.

The sum of two products has the K + K2 products of both. One of them that is rounded before the other is added is a partial sum.

The assembly of the constants is ours and conservative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import GemmtuneError
from ..problem import Problem
from ..problem.dtypes import dtype_info
from .operands import SCALES
from .quantized import blocks_of_k

INPUT_ERROR: dict[str, float] = {"ieee": 0.0, "parts": 2.0**-22, "tf32": 2.0**-10}
"""Largest relative error of reading one input. tf32 keeps 11 significand bits; hardware may cut off the rest, not round. Parts of 8
bits each, cut off, lose no bit, but of their nine products those of middle and low parts are left out: below 2^-22 of a product
each, which is as if both inputs had been read so inexactly."""
PRODUCTS_OF_PARTS = 6
SMALL_PARTS = 2.0**-6 * 1.02
"""How large the five products that have a lower part are together, relative to the whole one."""
LOSES_PARTS = 2.0**16
"""Times the smallest normal number: below that, float32 has parts that no bfloat16 holds."""

NARROWEST_BLOCK = 4
"""Elements that a matrix instruction multiplies and adds at a time, at the least (SM75)."""
SCALAR_OPERATIONS = 3
"""alpha ·, beta ·, +; or scale_a ·, scale_b ·, − zero_b."""
FLOAT8_BITS = 14
"""Significand bits of the sums of 8-bit floats on SM90, the fewest of any GPU (PyTorch's notes on ``use_fast_accum``)."""
PROMOTED_EVERY = 128
"""Elements of K after which such a sum goes into a float32 one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a kernel says of its arithmetic; verification holds it to exactly this.

    ``accumulate`` is the type of the running sum, ``partials`` the type in which partial sums are stored (of split-K, or of one of
    two products that is rounded before the other is added), ``splits`` how many there may be, ``epilogue_input`` the type to which
    the accumulator is rounded before the epilogue; this and ``partials`` are ``accumulate`` unless given. ``accumulator_bits`` is
    how many significand bits the running sum really has, where a matrix unit keeps fewer than its type; None: as many as the type,
    but for 8-bit floats on a GPU what the narrowest unit has.
    """

    accumulate: torch.dtype
    partials: torch.dtype = None  # type: ignore[assignment]
    epilogue_input: torch.dtype = None  # type: ignore[assignment]
    splits: int = 1
    weights: torch.dtype | None = None
    """The dtype to which a kernel of mixed_mm rounds (b − zero_b) · scale_b before it multiplies; None: it multiplies b as it is
    and scales sums."""
    input_mode: str = "ieee"
    flush_subnormals: bool = False
    deterministic: bool = True
    accumulator_bits: int | None = None
    promoted_every: int | None = None
    """Elements of K after which the sum of a matrix unit, which may truncate, is added to one that rounds to nearest."""
    skips_zeros: bool = False
    """Products with a zero may be left out: where 0 · NaN or 0 · ∞ counts, the result may be anything."""
    skips_absent: bool = False
    """Products with blocks that a block-sparse b does not have are left out, so that a NaN or an infinity of a does not show there;
    else it may."""

    def __post_init__(self) -> None:
        for name in ("partials", "epilogue_input"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.accumulate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """E = relative · S + absolute."""

    relative: float | torch.Tensor
    absolute: float | torch.Tensor
    """Numbers, or float64 [N] where they differ from column to column."""

    def __call__(self, magnitude: torch.Tensor) -> torch.Tensor:
        """E for S = ``magnitude``."""
        return magnitude * self.relative + self.absolute


def underflow(dtype: torch.dtype, *, flush: bool) -> float:
    """The largest absolute error that a result near zero adds to the relative one."""
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
    """E for alpha · a @ b + beta · inp, or a @ b + c @ d, with the rounding to ``epilogue_input`` but not the one to out's type.

    ``largest`` gives max|a| + max|b|, each only if the other one has subnormal numbers (``Operands.beside_subnormal``); asked only
    where such numbers may be read as 0, or weights become such. ``extended`` says that R is better than a float64 product, whose
    error would otherwise count too. With scales, ``alpha`` is 1: scales are taken to be at most that of SCALES. ``terms``: so many
    products of a sum at most are not 0.

    Raises:
        GemmtuneError: an input mode of which nothing is known.
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
    """The type of what the epilogue gets: the claimed one, but sums of integers become float32 before any function is applied."""
    claimed = claims.epilogue_input
    return problem.epilogue_dtype if problem.epilogue is not None and dtype_info(claimed).is_integer else claimed


def _growth(x: float) -> float:
    """(1 + u)^n − 1 for n·u = x, from above."""
    return math.expm1(min(x, 600.0))


def _operations(k: int) -> int:
    """Additions and multiplications on the way of a product into a sum of ``k``."""
    return k + math.ceil(k / NARROWEST_BLOCK)


def _last_operations(problem: Problem) -> int:
    """Operations after those of one block's sum: additions of blocks that have scales of their own, multiplications."""
    blocks = blocks_of_k(problem)
    return SCALAR_OPERATIONS + (blocks + 1 if blocks > 1 else 0)


def _accumulation(problem: Problem, claims: Claims, k: int) -> float:
    """The relative part of the bound that comes from summing ``k`` products, and from alpha, beta or scales."""
    roundoff = dtype_info(claims.accumulate).unit_roundoff
    truncating = 2 * roundoff if _truncates(problem, claims) else roundoff
    last = claims.splits + _last_operations(problem)
    bits = _accumulator_bits(problem, claims)
    # The small products come first; the last sum goes on from them, or is added to them in pieces.
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
    """Whether tensor cores may sum in float32: they cut off, where others round."""
    matrix_unit = problem.dtype != torch.float32 or claims.input_mode != "ieee"
    return problem.device_type != "cpu" and matrix_unit and claims.accumulate == torch.float32


def _accumulator_bits(problem: Problem, claims: Claims) -> int | None:
    """Significand bits of the running sum where those are fewer than its type has, else None."""
    bits = claims.accumulator_bits
    if bits is None and problem.float8 and problem.device_type != "cpu":
        bits = FLOAT8_BITS
    return bits if bits is not None and 2**bits < dtype_info(claims.accumulate).exact_integer else None


def exact_limit(problem: Problem, claims: Claims) -> int:
    """Sums of integers up to this magnitude are exact in every number that the kernel holds on the way."""
    held = (problem.accumulator, claims.accumulate, claims.partials)
    limits = [dtype_info(dtype).exact_integer for dtype in held]
    bits = _accumulator_bits(problem, claims)
    limits += [2**bits] if bits is not None else []
    return min(limits) // 2  # a bit in reserve for alpha
