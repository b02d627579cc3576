"""Expectation of a grouped product: values and bounds of each group's sums."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..problem import Problem
from ..problem.scales import SCALE_BLOCK
from .bounds import Bound, Claims, epilogue_input, exact_limit
from .expectation import Expectation, Part
from .operands import SCALES, Operands
from .propagate import Approximate
from .quantized import numbers
from .reference import Region, products
from .routed import added_up, gated, rows_of


@dataclass(frozen=True, kw_only=True)
class GroupedExpectation(Expectation):
    """Expectation with a float64 ``value`` and ``magnitude`` for each region. A NaN magnitude allows any result.

    ``exactness`` is ``bits`` if each result is one number of an operand, and ``integers`` if sums are exact. Otherwise the
    bound applies.
    """

    regions: tuple[Region, ...]
    values: tuple[torch.Tensor, ...]
    magnitudes: tuple[torch.Tensor, ...]
    exactness: str = ""
    terms: tuple[int, ...] = ()
    """Number of terms in the sums of each matrix of the result, if groups divide the terms."""

    @functools.cached_property
    def _beside_subnormal(self) -> float:
        """Ignore numbers that are not finite, because their products are not finite either."""
        a, b = map(_finite, (self.operands.a, self.operands.b))
        return dataclasses.replace(self.operands, a=a, b=b).beside_subnormal()

    def parts(self, problem: Problem, claims: Claims) -> Iterator[Part]:
        for whole in zip(self.regions, self.values, self.magnitudes, strict=True):
            yield self._part(problem, claims, *whole)

    def _part(self, problem: Problem, claims: Claims, region: Region, value: torch.Tensor, magnitude: torch.Tensor) -> Part:
        relative, absolute = self._bounds(problem, claims, magnitude)
        free = magnitude.isnan()

        def sums(batches: slice, rows: slice) -> Approximate:
            bound = Bound(relative=relative[batches], absolute=absolute[batches])
            error = bound(magnitude[batches, rows]).masked_fill(free[batches, rows], math.inf)
            product = Approximate(value=value[batches, rows], error=error)
            if not problem.gated:
                return product
            return gated(problem, product, held=epilogue_input(problem, claims), flush=claims.flush_subnormals)

        bits = self.exactness == "bits" and problem.epilogue is None

        def equal(batches: slice, rows: slice) -> torch.Tensor:
            return value[batches, rows].to(problem.accumulator)

        return Part(region=region, sums=sums, equal=equal if bits else None)

    @staticmethod
    def _summed(problem: Problem, bound: Bound) -> Bound:
        """Return the bound of rows that are weighted and added up. Each of them may lose a result near zero."""
        each = 0 if problem.weights is None else problem.weights.size[1]
        return bound if not each else Bound(relative=bound.relative, absolute=bound.absolute * (each + 1) * SCALES[1])

    def _bounds(self, problem: Problem, claims: Claims, magnitude: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the relative and the absolute part of the bound for each matrix of the result, [B, 1, 1]."""
        finite = magnitude[magnitude.isfinite()]
        largest = float(finite.max()) if self.exactness and finite.numel() else 0.0
        each = 0 if problem.weights is None else problem.weights.size[1]
        counts = self.terms or (problem.k + each,)
        if self.exactness and largest <= exact_limit(problem, claims):
            bounds = [Bound(relative=0.0, absolute=0.0)] * len(counts)
        else:
            bounds = [self._summed(problem, self._bound(problem, claims, terms=count)) for count in counts]
        made = [
            torch.tensor([getattr(x, name) for x in bounds], dtype=torch.float64, device=magnitude.device).view(-1, 1, 1)
            for name in ("relative", "absolute")
        ]
        return made[0], made[1]


def _finite(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        return x
    wide = x.float() if x.element_size() == 1 else x
    return wide.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).to(x.dtype)


def of_rows(
    problem: Problem, operands: Operands, pieces: list[tuple[int, int]], region: Region
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a @ b[g] and |a| @ |b[g]| for the rows of each group.

    Rows of no group are 0 with a magnitude of NaN. Gated columns give both halves. If rows are added up, return the sums.
    """
    result = region
    region = rows_of(problem, operands, region)
    device = operands.a.device
    rows = torch.arange(problem.m, device=device) if region.rows is None else region.rows
    cols = problem.b.size[-1] if region.cols is None else len(region.cols)
    value = torch.zeros((1, len(rows), cols), dtype=torch.float64, device=device)
    magnitude = torch.full_like(value, math.nan)
    starts = torch.searchsorted(rows, torch.tensor(pieces, device=device)).tolist()
    for g, (first, last) in enumerate(starts):
        if first < last:
            matrix = _matrix(problem, operands, g)
            right = matrix if region.cols is None else matrix[:, region.cols]
            value[:, first:last], magnitude[:, first:last] = _product(_lines(operands, rows[first:last]), right)
    return (value, magnitude) if problem.weights is None else added_up(problem, operands, result, value, magnitude)


def _lines(operands: Operands, rows: torch.Tensor) -> torch.Tensor:
    """Return the values of rows of a, with scales applied."""
    if operands.rows is not None:
        rows = operands.rows[rows]
    if operands.scale_a is None:
        return operands.a[rows]
    values, scale = operands.a.double()[rows], operands.scale_a[rows].double()
    return values * _spread(scale, values.shape[1], 1, SCALE_BLOCK)


def _matrix(problem: Problem, operands: Operands, group: int) -> torch.Tensor:
    """Return the values of a group's b, with scales applied."""
    if operands.scale_b is None:
        return operands.b[group]
    values, scale = numbers(operands.b[group], operands.encoding).double(), operands.scale_b[group].double()
    rows, cols = problem.scale_block("scale_b")
    return values * _spread(_spread(scale, values.shape[0], 0, rows), values.shape[1], 1, cols)


def _spread(scale: torch.Tensor, size: int, dim: int, block: int) -> torch.Tensor:
    """Expand a scale to one number for each line along ``dim``, or keep its one number for all lines."""
    return scale if scale.shape[dim] == 1 else scale.repeat_interleave(block, dim).narrow(dim, 0, size)


def of_terms(
    problem: Problem, operands: Operands, pieces: list[tuple[int, int]], region: Region
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a[:, g] @ b[g] for the terms of each group, and the product of magnitudes."""
    a, b = operands.a, operands.b
    left, right = Region(rows=region.rows).of(a), Region(cols=region.cols).of(b)
    size = (problem.groups, left.shape[0], right.shape[1])
    value, magnitude = (torch.zeros(size, dtype=torch.float64, device=a.device) for _ in range(2))
    for g, (begin, end) in enumerate(pieces):
        if begin < end:
            value[g : g + 1], magnitude[g : g + 1] = _product(left[:, begin:end], right[begin:end])
    return value, magnitude


def _product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product and the product of magnitudes, both [1, M, N].

    A NaN magnitude becomes infinite, so that any result is correct. An infinite one becomes the largest number, so that
    only the expected value is correct.
    """
    value, magnitude = products(a.unsqueeze(0), b.unsqueeze(0))
    return value, magnitude.nan_to_num(nan=math.inf)
