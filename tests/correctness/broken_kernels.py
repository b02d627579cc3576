"""Kernels and choices in plain torch, made of the products of the conformance suite's mutants, right and broken ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from mutants.products import (
    Product,
    backwards,
    blocks,
    narrowed,
    one_by_one,
    pairwise,
    rounding_blocks,
    shuffled,
    split_k,
    tensor_core,
    tf32,
    to_tf32,
)

from gemmtune.choice import Choice, Claims, Kernel, Scalars, Tensors
from gemmtune.problem import Problem
from gemmtune.problem.epilogue import evaluate

__all__ = [
    "CPU",
    "MadeChoice",
    "Product",
    "backwards",
    "blocks",
    "choice_of",
    "claims_of",
    "kernel",
    "narrowed",
    "one_by_one",
    "pairwise",
    "rounding_blocks",
    "shuffled",
    "split_k",
    "spread_out",
    "tensor_core",
    "tf32",
    "to_tf32",
]

CPU = torch.device("cpu")


def claims_of(dtype: torch.dtype, **changes: Any) -> Claims:
    """The strictest claims for inputs of ``dtype``, with changes."""
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    return Claims(**({"accumulate": accumulator, "partials": accumulator, "epilogue_input": accumulator} | changes))


def spread_out(problem: Problem, tensors: Tensors, scalars: Scalars) -> tuple[Any, ...]:
    """The arguments of the kernels here: a, b, inp (or None), alpha, beta, and a tuple of all other tensors."""
    a, b, *rest = tensors
    inp = rest.pop(0) if problem.inp is not None else None
    return (a, b, inp, *(scalars or (1.0, 0.0)), tuple(rest))


@dataclass(frozen=True, kw_only=True)
class MadeChoice(Choice):
    """A choice that is one Python function of what ``spread_out`` gives."""

    run: Callable[..., None]
    run_new: Callable[..., torch.Tensor] | None = None
    packing: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def content_hash(self) -> str:
        return self.name

    def bind(self, loaded: object) -> Kernel:
        run, run_new = self.run, self.run_new
        return Kernel(
            run=lambda out, tensors, scalars: run(out, *spread_out(self.problem, tensors, scalars)),
            run_new=None if run_new is None else lambda tensors, scalars: run_new(*spread_out(self.problem, tensors, scalars)),
        )

    @property
    def packed_format(self) -> str | None:
        return None if self.packing is None else "made"

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        assert self.packing is not None
        return self.packing(b)


def choice_of(problem: Problem, run: Callable[..., None], claims: Claims | None = None, **fields: Any) -> MadeChoice:
    """A choice that runs ``run``."""
    return MadeChoice(
        name="made:choice", backend="made", problem=problem, claims=claims or claims_of(problem.dtype), run=run, **fields
    )


def kernel(problem: Problem, product: Product = torch.matmul) -> Callable[..., None]:
    """A right kernel around ``product``: alpha, beta, epilogue in the accumulator's dtype, one rounding at the end."""

    def run(
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        inp: torch.Tensor | None,
        alpha: float,
        beta: float,
        extra: tuple[torch.Tensor, ...],
    ) -> None:
        acc = product(a.to(problem.accumulator), b.to(problem.accumulator))
        if alpha != 1:
            acc = acc * alpha
        if inp is not None and beta != 0:
            acc = acc + inp.to(acc.dtype) * beta
        out.copy_(acc if problem.epilogue is None else evaluate(problem.epilogue, acc, extra))

    return run
