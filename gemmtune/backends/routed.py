"""Grouped products whose rows are picked, gated or added up, by a plain grouped product and torch's own steps around it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..choice import Choice, Claims, Kernel, Offers, Scalars, Tensors
from ..numerics.routed import grouped_problem
from ..problem import Problem
from ..problem.epilogue import evaluate
from ..problem.grouped_compositions import added_by_token, gated_columns

__all__ = ["BY_INDEX", "RoutedChoice", "grouped_problem", "routed"]

BY_INDEX = ("routed_grouped_mm", "combined_grouped_mm")
"""The operations that are a plain grouped product with steps before or behind it."""
MOST_OF_EACH = 4
"""Plain products of one backend that are tried so."""


def routed(problem: Problem, offers: Offers) -> Offers:
    """What was offered for ``grouped_problem(problem)``, the first few, as choices for the one with further steps."""
    return Offers(choices=tuple(RoutedChoice.around(problem, choice) for choice in offers.choices[:MOST_OF_EACH]))


@dataclass(frozen=True, kw_only=True)
class RoutedChoice(Choice):
    """``inner`` on rows that torch has picked; what it gives is gated, or weighted and added up, by torch."""

    inner: Choice = field(repr=False)

    @classmethod
    def around(cls, problem: Problem, inner: Choice, *, baseline: bool = False) -> RoutedChoice:
        """The choice that does ``problem`` by ``inner``."""
        return cls(
            name=f"{inner.name}+routed",
            backend=inner.backend,
            problem=problem,
            claims=_claims(problem, inner.claims),
            info={**inner.info, "routed": True},
            baseline=baseline,
            inner=inner,
        )

    @property
    def content_hash(self) -> str:
        """Over the inner choice, and that there are steps around it."""
        return hashlib.sha256(f"{self.inner.content_hash} routed {self.problem.epilogue is not None}".encode()).hexdigest()

    @property
    def compile_key(self) -> str | None:
        """The same as the inner choice's."""
        return self.inner.compile_key

    @property
    def compiled(self) -> bool:
        """Whether the inner choice is."""
        return self.inner.compiled

    @property
    def obstacle(self) -> str | None:
        """The same as the inner choice's."""
        return self.inner.obstacle

    def compile(self) -> None:
        """Compile the inner choice."""
        self.inner.compile()

    def load(self) -> Any:
        """What the inner choice loads."""
        return self.inner.load()

    def bind(self, loaded: Any) -> Kernel:
        """The inner kernel between torch's steps."""
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

    def launch_variants(self) -> Sequence[Choice]:
        """Those of the inner choice."""
        return [RoutedChoice.around(self.problem, variant) for variant in self.inner.launch_variants()]


def _claims(problem: Problem, inner: Claims) -> Claims:
    """Each step rounds to the dtype of the operands."""
    if problem.weights is not None:
        return replace(inner, partials=problem.dtype, splits=inner.splits + 1)
    return replace(inner, epilogue_input=problem.dtype)
