"""mixed_mm by torch: b as a matrix of a's dtype, then torch.mm."""

from __future__ import annotations

import torch

from ...choice import Kernel, Scalars, Tensors
from ...problem import Problem
from ...problem.compositions import dequantized
from .dense import product_kernel
from .eager import then_eager, where_contiguous

__all__ = ["kernel_of"]


def kernel_of(problem: Problem) -> Kernel:
    """The calls for a mixed_mm problem."""
    product = product_kernel(problem)
    dtype, encoding, zeros = problem.dtype, problem.encoding, problem.zero_b is not None
    fresh = product.run_new
    assert fresh is not None

    def pair(tensors: Tensors) -> Tensors:
        a, b, *scales = tensors
        scale, zero = scales[0] if scales else None, scales[1] if zeros else None
        return a, dequantized(b, scale, zero, encoding, dtype)

    def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
        product.run(out, pair(tensors), scalars)

    def run_new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:
        return fresh(pair(tensors), scalars)

    kernel = Kernel(run=run, run_new=run_new)
    if problem.epilogue is not None:
        kernel = then_eager(kernel, problem, problem.epilogue)
    return where_contiguous(kernel, problem)
