"""What a result must be, element by element, where it is to be explained why one is not."""

from __future__ import annotations

import dataclasses

import torch

from ...choice import Claims
from ...numerics.bounds import Bound, epilogue_input, underflow
from ...numerics.operands import Operands
from ...numerics.pick import Pick
from ...numerics.propagate import Approximate, propagate, rounded
from ...numerics.reference import Reference, as_batches
from ...problem import Problem
from ...problem.dtypes import dtype_info

__all__ = ["Expected", "Judged", "exactly", "within"]

MOST_EXPLAINED = 2**28
"""Elements of a result that is wrong: of a larger one only the first bad element is told."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """What a result must be: ``value`` within ``tolerance``, float64 [B, M, N]; with the operands that it came from."""

    name: str
    operands: Operands
    value: torch.Tensor
    tolerance: torch.Tensor
    known: bool = True
    """Not known, ``value`` may be wrong itself: then no bug can be named that would explain the result."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What results of one problem are held to."""

    problem: Problem
    claims: Claims
    extra: tuple[torch.Tensor, ...]
    """The epilogue's operands."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """[B, M, N]"""
        return self.problem.batch, self.problem.m, self.problem.n


def exactly(judged: Judged, pick: Pick, bound: Bound | None = None) -> Expected | None:
    """Of a probe that picks elements, within ``bound`` of their magnitude if given. None where several float64 copies of the result
    would take too much memory."""
    problem = judged.problem
    if problem.out.numel > MOST_EXPLAINED:
        return None
    batches, rows = slice(0, problem.batch), slice(0, problem.m)
    value = pick.exact(batches, rows, torch.float64).expand(judged.shape)
    if bound is not None:
        value, tolerance = _finished(judged, value, bound(pick.magnitude(batches, rows)).expand(judged.shape))
    elif problem.epilogue is not None:
        value, tolerance = _finished(judged, value, torch.zeros_like(value))
    else:
        tolerance = torch.zeros_like(value)
    return Expected(name=pick.name, operands=pick.operands, value=value, tolerance=tolerance)


def within(judged: Judged, operands: Operands, part: Reference, bound: Bound) -> Expected | None:
    """Of a product with a reference. None where only a sample of the result has one."""
    if part.region.rows is not None or part.region.cols is not None:
        return None
    value, tolerance = _finished(judged, part.value, bound(part.magnitude))
    return Expected(name="", operands=operands, value=value, tolerance=tolerance)


def _finished(judged: Judged, value: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(value, error) after the epilogue and the rounding to the result's dtype."""
    problem, claims = judged.problem, judged.claims
    info, flush = dtype_info(problem.out.dtype), claims.flush_subnormals
    if problem.epilogue is None:
        return value, error + info.unit_roundoff * (value.abs() + error) + underflow(info.dtype, flush=flush)
    extra = [as_batches(x.expand(problem.out.size)) for x in judged.extra]
    before = rounded(Approximate(value=value, error=error), epilogue_input(problem, claims), flush=False)
    after = propagate(problem.epilogue, before, extra, precision=problem.epilogue_dtype, flush=flush, reference_is_float64=False)
    result = rounded(after, info.dtype, flush=flush)
    return result.value, result.error
