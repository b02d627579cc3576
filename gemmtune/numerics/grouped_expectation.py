"""Expectation of a grouped product: values and bounds of each group's sums."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..problem import Problem
from .bounds import Bound, Claims, epilogue_input, exact_limit
from .expectation import Expectation, Part
from .operands import SCALES
from .propagate import Approximate
from .reference import Region
from .routed import gated


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
        for region, value, magnitude in zip(self.regions, self.values, self.magnitudes, strict=True):
            relative, absolute = self._bounds(problem, claims, magnitude)
            free = magnitude.isnan()

            def sums(
                batches: slice,
                rows: slice,
                value: torch.Tensor = value,
                magnitude: torch.Tensor = magnitude,
                free: torch.Tensor = free,
                relative: torch.Tensor = relative,
                absolute: torch.Tensor = absolute,
            ) -> Approximate:
                bound = Bound(relative=relative[batches], absolute=absolute[batches])
                error = bound(magnitude[batches, rows]).masked_fill(free[batches, rows], math.inf)
                product = Approximate(value=value[batches, rows], error=error)
                if not problem.gated:
                    return product
                return gated(problem, product, held=epilogue_input(problem, claims), flush=claims.flush_subnormals)

            bits = self.exactness == "bits" and problem.epilogue is None

            def equal(batches: slice, rows: slice, value: torch.Tensor = value) -> torch.Tensor:
                return value[batches, rows].to(problem.accumulator)

            yield Part(region=region, sums=sums, equal=equal if bits else None)

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
