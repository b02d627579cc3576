"""Expectation that shows a kernel reading a where b has no block: a NaN or infinity of a must not show there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..problem import Problem
from ..problem.sparsity import Sparsity
from .block_sparse import awkward_masks, spread
from .bounds import Claims
from .buffers import distinct
from .drawing import Drawing
from .expectation import Expectation, Part
from .integers import MOST_ADDED
from .propagate import Approximate
from .reference import Region, as_batches


@dataclass(frozen=True, kw_only=True)
class AbsentExpectation(Expectation):
    """Expectation for an a of ones with an infinity in its last column and a b of ones in its existing blocks.

    Every sum is a count. ``counts`` [N] counts the ones of b without its last row. ``present`` [N] marks the columns
    with a block there.
    """

    counts: torch.Tensor
    present: torch.Tensor

    @classmethod
    def drawn(cls, draw: Drawing, sparsity: Sparsity) -> AbsentExpectation:
        """Draw the expectation of a problem whose a can hold an infinity in its last column."""
        n, k = draw.problem.n, draw.problem.k
        mask = next(mask for _, mask in awkward_masks((n, k), sparsity, draw.device))
        b = spread(mask, sparsity).t().to(draw.problem.dtype)
        ones = torch.ones(draw.size_a, dtype=draw.work_a, device=draw.device)
        finite = draw.operands(draw.placed_a(ones), draw.placed_b(b.unsqueeze(0)), added=draw.small_inp(MOST_ADDED))
        distinct(finite.a)[..., -1] = math.inf
        return cls(name="absent blocks", operands=finite, counts=b[:-1].double().sum(dim=0), present=b[-1] != 0)

    def parts(self, problem: Problem, claims: Claims) -> Iterator[Part]:
        """Yield the whole result as one part.

        Where b has no block, the value is the count if the claims say that absent blocks are skipped. Otherwise any
        value passes.
        """
        operands, bound = self.operands, self._bound(problem, claims)
        value = torch.where(self.present, math.inf, self.counts) * operands.alpha
        unknown = torch.full_like(self.counts, 0.0 if claims.skips_absent else math.inf).masked_fill(self.present, 0.0)
        magnitude = self.counts * abs(operands.alpha)
        size = (problem.batch, problem.m, problem.n)

        def sums(batches: slice, rows: slice) -> Approximate:
            shown, most = value.expand(size)[batches, rows], magnitude.expand(size)[batches, rows]
            if operands.inp is not None and operands.beta != 0:
                added = as_batches(operands.inp.expand(problem.out.size))[batches, rows].double() * operands.beta
                shown, most = shown + added, most + added.abs()
            return Approximate(value=shown, error=bound(most) + unknown)

        yield Part(region=Region(), sums=sums)
