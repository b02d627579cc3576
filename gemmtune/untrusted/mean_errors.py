"""Mean errors of a result, which show a narrower accumulator or operand where the bound of the worst case allows it."""

import math
from dataclasses import dataclass

import torch

from ..choice import Claims
from ..numerics.bounds import INPUT_ERROR
from ..numerics.operands import Operands
from ..numerics.reference import Reference, as_batches
from ..problem import Problem
from ..problem.dtypes import dtype_info
from .rounded import rounded_to

OF_STEPS = 4.0
"""Multiple of the accumulator's roundoff, times the sum of the magnitudes, that the mean error may have.

A sum from the first term to the last has about a third of that roundoff.
"""
TRUNCATING = 4.0
"""Further factor on a GPU, whose matrix units truncate."""
OF_ROUNDING = 1.5
"""Multiple of the error of rounding the result once, which the mean error may have."""
LARGE = 0.5
"""Share of the result's size from which on an error is none of a narrower type. The bound of very long sums allows any result."""
COMPARED, OF_SEQUENTIAL = 256, 4.0
"""Elements with the largest errors that are added up again from the first term to the last, and multiple of that sum's error.

Equal terms are all rounded in one direction, and some sums are far larger on the way than in the end. Where a plain sum has such
errors too, a large one shows no narrower type.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Error of one result. ``rough`` says that only the mean error is too large."""

    text: str
    rough: bool = False


@dataclass(frozen=True, slots=True)
class Expected:
    """Mean errors of the rounding of a result and of its sums, as shares of the result and of the sum of magnitudes."""

    rounding: float
    sums: float
    growth: float
    """Ratio of the root of the sum of the squares of all partial sums to the last one, if terms have one sign.

    Each partial sum is rounded once. If signs differ, the sum of the magnitudes is larger.
    """


def expected(problem: Problem, claims: Claims) -> Expected | None:
    """Return the mean errors that a GEMM with these claims may have. None: they are not known."""
    if dtype_info(problem.dtype).is_integer or problem.scales or problem.epilogue is not None:
        return None
    steps = max(dtype_info(dtype).unit_roundoff for dtype in (claims.accumulate, claims.partials))
    if claims.accumulator_bits is not None:
        steps = max(steps, 2.0**-claims.accumulator_bits)
    factor = OF_STEPS * (1.0 if problem.device_type == "cpu" else TRUNCATING)
    rounding = OF_ROUNDING * dtype_info(problem.out.dtype).unit_roundoff + 2 * INPUT_ERROR[claims.input_mode]
    return Expected(rounding, factor * steps, math.sqrt(problem.k / 3))


def rough(problem: Problem, claims: Claims, result: torch.Tensor, known: Reference, operands: Operands) -> Trouble | None:
    """Return the trouble of a result whose mean error is that of narrower sums, or of rounded operands, or None."""
    if (mean := expected(problem, claims)) is None:
        return None
    errors = known.region.of(as_batches(result)).double() - known.value
    error, right, magnitude = (_rms(x) for x in (errors, known.value, known.magnitude))
    if not math.isfinite(magnitude):
        return None
    info = dtype_info(problem.out.dtype)
    allowed = mean.rounding * right + mean.sums * max(magnitude, right * mean.growth)
    allowed += OF_ROUNDING * info.unit_roundoff * info.smallest_normal  # that of rounding a number below the normal ones
    is_stored_otherwise = bool(problem.encoding) or problem.widens_b or problem.sparsity is not None
    if error > allowed and (is_stored_otherwise or not _is_usual(errors, mean, claims.accumulate, known, operands)):
        text = f"the mean error is {error:.3g}, expected at most {allowed:.3g} for {claims.accumulate} sums"
        return Trouble(text=text, rough=error < LARGE * right)
    if is_stored_otherwise or not operands.alpha:
        return None
    a, b = known.region.of(as_batches(operands.left)), as_batches(operands.right)
    if (narrower := rounded_to(errors / operands.alpha, a, b, problem.dtype, claims.input_mode)) is None:
        return None
    return Trouble(text=f"the errors are those of operands rounded to {narrower}", rough=True)


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _is_usual(errors: torch.Tensor, mean: Expected, accumulate: torch.dtype, known: Reference, operands: Operands) -> bool:
    """Return True if the largest errors are no larger than a plain sum in the type of the accumulator has there, too."""
    if not accumulate.is_floating_point:
        return False
    largest = errors.abs().flatten().topk(min(COMPARED, errors.numel())).indices
    columns = errors.shape[-1]
    matrix, row, column = largest // columns // errors.shape[-2], largest // columns % errors.shape[-2], largest % columns
    a, b = known.region.of(as_batches(operands.left)), as_batches(operands.right)
    terms = a[matrix, row].double() * b[matrix, :, column].double() * operands.alpha
    total = torch.zeros_like(terms[:, 0])
    for term in terms.T:
        total = (total + term).to(accumulate).double()
    sequential = total - terms.sum(-1)
    rounding = mean.rounding * _rms(known.value[matrix, row, column])
    return _rms(errors[matrix, row, column]) <= OF_SEQUENTIAL * _rms(sequential) + rounding
