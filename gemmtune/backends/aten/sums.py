"""mm_plus_mm by torch: the second product, then the first one added to it."""

from __future__ import annotations

import torch

from ...choice import Kernel, Scalars, Tensors
from ...problem import Problem
from .dense import product_kernel
from .eager import gemm_dtype, then_eager, where_contiguous

__all__ = ["kernel_of"]

Tensor = torch.Tensor


def kernel_of(problem: Problem) -> Kernel:
    """The calls for a mm_plus_mm problem. c @ d is rounded to the dtype of a, unless the result is asked for in a wider one."""
    kernel = _wide(problem) if gemm_dtype(problem) != problem.dtype else _added()
    if problem.epilogue is not None:
        kernel = then_eager(kernel, problem, problem.epilogue)
    return where_contiguous(kernel, problem)


def _added() -> Kernel:
    """What torch.compile makes of a @ b + c @ d as well: one product, and one that is added to it in place."""

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:  # noqa: ARG001
        a, b, c, d = tensors
        torch.mm(c, d, out=out)
        out.addmm_(a, b)

    def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:  # noqa: ARG001
        a, b, c, d = tensors
        return torch.mm(c, d).addmm_(a, b)

    return Kernel(run=run, run_new=run_new)


def _wide(problem: Problem) -> Kernel:
    """Both products in a dtype wider than the inputs'."""
    product = product_kernel(problem).run_new
    assert product is not None

    def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:
        return product(tensors[2:], scalars).add_(product(tensors[:2], scalars))

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        out.copy_(run_new(tensors, scalars))

    return Kernel(run=run, run_new=run_new)
