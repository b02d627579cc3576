"""mixed_mm by torch: b as a matrix of a's dtype, then torch.mm."""

from __future__ import annotations

import torch

from ...choice import Kernel
from ...problem import Problem
from ...problem.compositions import dequantized
from .dense import product_kernel
from .eager import then_eager, where_contiguous

__all__ = ["kernel_of"]


def kernel_of(problem: Problem) -> Kernel:
    """The calls for a mixed_mm problem."""
    product = product_kernel(problem)
    dtype, encoding, zeros = problem.dtype, problem.encoding, problem.zero_b is not None
    scales = len(problem.scales)
    fresh = product.run_new
    assert fresh is not None

    def matrix(b: torch.Tensor, extra: tuple[torch.Tensor, ...]) -> torch.Tensor:
        scale = extra[0] if scales else None
        return dequantized(b, scale, extra[1] if zeros else None, encoding, dtype)

    def run(
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        inp: torch.Tensor | None,
        alpha: float,
        beta: float,
        extra: tuple[torch.Tensor, ...],
    ) -> None:
        product.run(out, a, matrix(b, extra), inp, alpha, beta, ())

    def run_new(
        a: torch.Tensor, b: torch.Tensor, inp: torch.Tensor | None, alpha: float, beta: float, extra: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        return fresh(a, matrix(b, extra), inp, alpha, beta, ())

    kernel = Kernel(run=run, run_new=run_new)
    if problem.epilogue is not None:
        kernel = then_eager(kernel, problem, problem.epilogue)
    return where_contiguous(kernel, problem)
