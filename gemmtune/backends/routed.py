"""Grouped products with picked, gated or added rows, by a plain grouped product and torch operations around it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..choice import Choice, Claims, Kernel, Offers, Scalars, Tensors
from ..numerics.routed import by_steps, grouped_problem
from ..problem import Problem
from ..problem.epilogue import evaluate
from ..problem.grouped_compositions import added_by_token, gated_columns
from .around import AroundChoice

__all__ = ["BY_INDEX", "RoutedChoice", "grouped_problem", "with_steps"]

BY_INDEX = ("routed_grouped_mm", "combined_grouped_mm")
"""Operations that are a plain grouped product with steps before or after it."""
MOST_OF_EACH = 4
"""Largest number of plain products of one backend that are tried with steps."""


def with_steps(problem: Problem, own: Offers, plain: Offers) -> Offers:
    """Return a backend's offers and its first few for ``grouped_problem(problem)``, whose refusals count if only it has choices."""
    around = tuple(RoutedChoice.around(problem, choice) for choice in plain.choices[:MOST_OF_EACH])
    refusals = plain.refusals if around and not own.choices else own.refusals
    return Offers(choices=(*own.choices, *around), refusals=refusals)


@dataclass(frozen=True, kw_only=True)
class RoutedChoice(AroundChoice):
    """``inner`` on rows that torch picked. torch then gates its result, or weights and adds up the rows."""

    step = "routed"

    @staticmethod
    def claimed(problem: Problem, inner: Choice) -> Claims:
        """Return the claims of ``inner`` with a rounding to the dtype of the operands in each step."""
        if problem.weights is None and not problem.gated:
            return replace(inner.claims, epilogue_input=problem.dtype)  # the rows are rounded before an epilogue
        return by_steps(problem, inner.claims)

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(f"{self.inner.content_hash} routed {self.problem.epilogue is not None}".encode()).hexdigest()

    def bind(self, loaded: Any) -> Kernel:
        product, problem, plain = self.inner.bind(loaded).run, self.problem, self.inner.problem
        count = len(problem.operands)

        def run_new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:  # noqa: ARG001
            a, b, offs, *rest = tensors[:count]
            x = a if problem.rows is None else a.index_select(0, rest[0])
            result = x.new_empty(plain.out.size)
            product(result, (x, b, offs), ())
            if problem.gated:
                result = gated_columns(result, problem.gated)
            if problem.weights is not None:
                result = added_by_token(result, offs, *rest)
            if problem.epilogue is not None:
                result = evaluate(problem.epilogue, result, tensors[count:])
            return result.to(problem.out.dtype)

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
            out.copy_(run_new(tensors, scalars))

        return Kernel(run=run)
