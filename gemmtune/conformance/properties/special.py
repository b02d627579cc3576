"""Properties of special numbers: NaN, infinities, the ends of the range, and operands that must not be read.

Operands are small integers with NaN or infinities among them, or numbers at the ends of the range. Every element of the result is
known exactly.
"""

import dataclasses
import functools
import itertools
import math

import torch

from ...declaration.labels import DTYPES
from ...numerics.buffers import storage_bits
from ...numerics.operands import Operands
from ...numerics.reference import Region, as_batches, reference
from ...problem.dtypes import dtype_info
from ...problem.operations import DENSE_OPS
from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.sampling import ADDED, Sample, Size, residues
from .property import Property, stage, tested

ZERO_BLOCK = 16
SHORT: tuple[Size, ...] = (
    (17, 33, 65), (64, 64, 64), (33, 40, 129), (128, 96, 31), (1, 48, 257), (65, 1, 48), (130, 129, 16), *residues(16),
)  # fmt: skip
"""Sizes with a short K, so that sums of integers are exact in every dtype."""
RANGED: tuple[Size, ...] = ((33, 65, 64), (64, 64, 31), (17, 128, 129), (96, 40, 257), (5, 6, 16))
ABOUT = 4
"""Average number of nonzero products in an element. This many overflow."""
SMALL_AGAIN = 2.0**-4
"""alpha that brings sums beyond the end of the range back into it."""
added_needs = tested(ADDED, "neither addmm nor baddbmm is tested")


def expect_exactly(bench: Bench, operands: Operands, *, name: str) -> bool:
    """Check a result that float64 gives exactly, apart from NaN, infinities and the last rounding."""
    result = bench.call(operands)
    expected = reference(operands, Region()).value.to(result.dtype).reshape(result.shape)
    if bench.claims.skips_zeros:  # 0 · NaN and 0 · ∞ are what the GEMM makes of them
        expected = torch.where(expected.isnan(), result, expected)
    return bench.expect_equal(result, expected, operands, name=name)


def check_nan(bench: Bench) -> None:
    """Check that one NaN in a, b or the added operand (the variant) reaches exactly the elements that depend on it.

    In the added operand it is also checked with alpha 0, for which many kernels have their own path.
    """
    _check_one_nan(bench)
    if bench.case.variant == "c" and not bench.failures and bench.subject.traits.alpha:
        with stage(bench, "alpha 0, beta 1"):
            _check_one_nan(bench.sibling(alpha="zero", beta="one"))


def _check_one_nan(bench: Bench) -> None:
    where = bench.case.variant or "a"
    operands = bench.probes.integers()
    tensor = {"a": operands.a, "b": operands.b, "c": operands.inp}[where[0]]
    if tensor is None:  # a drawn case of an operation that adds nothing
        tensor = operands.a
    places = {"first": [0] * tensor.dim(), "last": [size - 1 for size in tensor.shape]}
    _put(tensor, tuple(places.get(where[2:], [size // 2 for size in tensor.shape])), math.nan)
    expect_exactly(bench, operands, name=f"NaN in {where[0]}")


def check_infinity(bench: Bench) -> None:
    """Check infinities in a or b (the variant) times 1, −1 and 0, of both signs in one line and in the added operand."""
    which = bench.case.variant or "a"
    operands = bench.probes.integers()
    if which == "c" and operands.inp is not None:
        _put(operands.inp, (0,) * operands.inp.dim(), math.inf)
        _put(operands.inp, (-1,) * operands.inp.dim(), -math.inf)
        expect_exactly(bench, operands, name="infinities in c")
        return
    lines = as_batches(operands.a) if which == "a" else as_batches(operands.b).mT
    count, k = lines.shape[-2:]
    _put(lines, (-1, count // 2, 0), math.inf)
    _put(lines, (-1, count // 2, k - 1), -math.inf)
    _put(lines, (-1, 0, k // 2), math.inf)
    _put(lines, (-1, count - 1, k - 1), -math.inf)
    expect_exactly(bench, operands, name=f"infinities in {which}")


def check_zeros(bench: Bench) -> None:
    """Check zeros in one operand (the variant names it and their place) against NaN or infinities in the other."""
    which, where, value = (bench.case.variant or "a.lines.nan").split(".")
    operands = bench.probes.integers()
    a, b = as_batches(operands.a), as_batches(operands.b).mT
    lines, others = (a, b) if which == "a" else (b, a)
    count, k = lines.shape[-2:]
    middle = k // 2 // ZERO_BLOCK * ZERO_BLOCK
    rows = {"lines": slice(count // 3, count - count // 3), "block": slice(0, ZERO_BLOCK)}.get(where, slice(None))
    inner = slice(middle, middle + ZERO_BLOCK) if where in ("block", "range") else slice(None)
    lines[..., rows, inner].copy_(torch.zeros((), dtype=torch.float32))
    _put(others, (slice(None), -1, middle), math.inf if value == "inf" else math.nan)
    _put(others, (slice(None), 0, min(middle + 1, k - 1)), -math.inf if value == "inf" else math.nan)
    expect_exactly(bench, operands, name=f"zeros in {which} against {value} ({where})")


def _put(tensor: torch.Tensor, index: tuple[int | slice, ...], value: float) -> None:
    """Set one element, or one of each matrix. It copies, since not every torch fills 8-bit floats."""
    tensor[index].copy_(torch.tensor(value))


def check_beta_zero(bench: Bench) -> None:
    """Check that beta 0 keeps the added operand, all NaN or all infinite (the variant), from being read."""
    operands = bench.probes.integers()
    if bench.case.variant == "infinite" and operands.inp is not None:
        storage_bits(operands.inp, operands.inp.dtype).fill_(math.inf)
    expect_exactly(bench, operands, name="beta 0")


def check_overflow(bench: Bench) -> None:
    """Check that sums beyond the largest number are infinite, and no others. Variant ``largest``: they just reach it.

    All terms of an element have one sign and are multiples of one power of two. The order of summation thus does not matter.
    Sums beyond the largest float16 must be finite if alpha makes them small again and no narrow sums are declared.
    """
    _check_range(bench)
    claims, largest = bench.claims, dtype_info(bench.problem.out.dtype).largest
    wider = all(dtype_info(x).largest > 2 * largest for x in (claims.accumulate, claims.partials, claims.epilogue_input))
    if bench.case.added and bench.subject.traits.alpha and not bench.failures and wider:
        with stage(bench, f"alpha {SMALL_AGAIN}"):
            _check_range(bench.sibling(variant="", alpha="general"), SMALL_AGAIN)


def _check_range(bench: Bench, alpha: float = 1) -> None:
    largest = dtype_info(bench.problem.out.dtype).largest - _cut_off(bench, 2.0**104)
    operands = bench.probes.integers()
    a, b = operands.a, operands.b
    if bench.case.variant == "largest":
        one_hot = torch.zeros(a.shape, device=bench.device)
        one_hot[..., torch.arange(a.shape[-2], device=bench.device), _draw(bench, (a.shape[-2],), 0, a.shape[-1] - 1)] = 1
        a.copy_(one_hot)
        b.copy_(largest * _signs(bench, tuple(b.shape)))
    else:
        half = 2.0 ** (math.frexp(largest)[1] // 2 - 1)
        a.copy_(half * _sparse(bench, tuple(a.shape)) * _signs(bench, (*a.shape[:-1], 1)))
        b.copy_(half * _sparse(bench, tuple(b.shape)) * _signs(bench, (*b.shape[:-2], 1, b.shape[-1])))
    if operands.inp is not None:
        operands.inp.zero_()
    for scale in (operands.scale_a, operands.scale_b):
        if scale is not None:
            scale.fill_(1)
    expect_exactly(bench, dataclasses.replace(operands, alpha=alpha), name="overflow")


def check_subnormal(bench: Bench) -> None:
    """Check sums of subnormal a or b, or ``results``: subnormal sums of normal numbers. Zero passes if flushing is declared."""
    operands = bench.probes.integers()
    a, b = operands.a, operands.b
    if bench.case.variant == "results":
        exponent = round(math.log2(dtype_info(bench.problem.out.dtype).smallest_subnormal))
        units = (2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2))
    else:
        which = bench.problem.b if bench.case.variant == "b" else bench.problem.a
        smallest = dtype_info(which.dtype).smallest_subnormal
        units = (smallest + _cut_off(bench, smallest), 1.0)
        units = units[::-1] if bench.case.variant == "b" else units
    a.copy_(_draw(bench, tuple(a.shape), -2, 2).double() * units[0])
    b.copy_(_draw(bench, tuple(b.shape), -2, 2).double() * units[1])
    if operands.inp is not None:
        operands.inp.zero_()
    if bench.claims.flush_subnormals:
        bench.expect(bench.call(operands), operands, name="subnormal numbers")
    else:
        expect_exactly(bench, operands, name="subnormal numbers")


def _cut_off(bench: Bench, unit: float) -> float:
    """Return the value of a float32's last 13 bits (last place ``unit``) if tf32 inputs drop them, else 0."""
    return (2**13 - 1) * unit if bench.problem.precision.input_mode == "tf32" else 0.0


def _draw(bench: Bench, size: tuple[int, ...], low: int, high: int) -> torch.Tensor:
    return torch.randint(low, high + 1, size, generator=bench.generator, device=bench.device)


def _signs(bench: Bench, size: tuple[int, ...]) -> torch.Tensor:
    return _draw(bench, size, 0, 1).double() * 2 - 1


def _sparse(bench: Bench, size: tuple[int, ...]) -> torch.Tensor:
    """Return zeros and ones, so dense that an element of a product has ABOUT nonzero terms on average."""
    density = min(1.0, math.sqrt(ABOUT / bench.problem.k))
    return (torch.rand(size, generator=bench.generator, device=bench.device) < density).double()


def _has_infinity(case: Case) -> bool:
    """Return True if the variant's operand exists and can be infinite. Zero points might subtract two infinities."""
    there = case.added or case.variant != "c"
    return there and dtype_info(_dtype(case)).has_infinity and case.k > 1 and case.zeros == "no"


def _dtype(case: Case) -> torch.dtype:
    """Return the dtype of the operand that the variant names."""
    return case.b_dtype if case.variant.startswith("b") else DTYPES[case.dtype]


def _has_zeros(case: Case) -> bool:
    """Return True if the operand of zeros has writable elements and the other one has the variant's NaN or infinity."""
    which, _, value = case.variant.split(".")
    dtype = dtype_info(case.b_dtype if which == "a" else DTYPES[case.dtype])
    return not case.packed and case.zeros == "no" and not dtype.is_integer and (value == "nan" or dtype.has_infinity)


_specials = functools.partial(Sample, budget=(48, 160, 800), shapes=SHORT)
_ranged = functools.partial(Sample, budget=(32, 96, 400), shapes=RANGED)
PROPERTIES = (
    Property(
        "nan", "a NaN reaches the elements that depend on it, and no others", check_nan,
        _specials(
            variants=("a", "b", "a.last", "b.last", "c", "a.first", "b.first"),
            admits=lambda case: not dtype_info(_dtype(case)).is_integer and (case.added or case.variant != "c"),
        ),
    ),
    Property(
        "infinity", "infinities keep their signs; ∞ − ∞ and ∞ · 0 are NaN", check_infinity,
        _specials(
            variants=("a", "b", "c"),
            admits=_has_infinity,
            # A larger beta times the largest number is infinite too.
            finish=lambda case: case.changed(beta="one") if case.variant == "c" else case,
        ),
    ),
    Property(
        "zeros", "lines, blocks and ranges of zeros against NaN and infinity give NaN", check_zeros,
        _specials(
            variants=tuple(
                f"{which}.{where}.{value}"
                for where, which, value in itertools.product(("lines", "block", "range", "all"), "ab", ("nan", "inf"))
            ),
            admits=_has_zeros,
        ),
        needs=lambda scope: "skips_zeros is declared" if scope.traits.skips_zeros else None,
    ),
    Property(
        "beta-zero", "with beta 0 the added operand is not read, be it NaN or infinite", check_beta_zero,
        Sample(
            budget=(32, 96, 400),
            shapes=(*SHORT, (5, 7, 0)),
            variants=("", "infinite"),
            ops=ADDED,
            # An odd M takes alpha 1, an even M the declared class, so that both are covered.
            finish=lambda case: case.changed(beta="zero", alpha="one" if case.m % 2 else case.alpha),
        ),
        needs=lambda scope: added_needs(scope) or (None if scope.traits.beta else "beta= is not declared"),
    ),
    Property(
        "overflow", "results beyond the largest number are the right infinity, and only those", check_overflow,
        _ranged(
            variants=tuple({"variant": name, "alpha": "one", "beta": "one"} for name in ("", "largest")),
            ops=(*DENSE_OPS, "scaled_mm"),
            # Sums of 8-bit floats can exceed float16 only.
            admits=lambda case: case.op in DENSE_OPS or (case.result == "float16" and case.variant == ""),
        ),
    ),
    Property(
        "subnormal", "subnormal inputs and results are kept, or become 0 where that is declared", check_subnormal,
        _ranged(
            variants=("", "results", "b"),
            # Products of 8-bit floats are not subnormal in 16 bits. tf32 drops the last bits of subnormal numbers.
            admits=lambda case: case.op in DENSE_OPS or (case.row.float8 and case.variant != "results"),
            dtypes=tuple(name for name in DTYPES if name != "tf32"),
        ),
        needs=lambda scope: "flush_subnormals is not declared" if scope.traits.flush_subnormals is None else None,
    ),
)  # fmt: skip
