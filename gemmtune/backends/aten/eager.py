"""An epilogue applied eagerly to the result of a product: the unfused way."""

from __future__ import annotations

import torch

from ...choice import Kernel, Scalars, Tensors
from ...problem import Epilogue, Layout, Problem
from ...problem.epilogue import evaluate

__all__ = ["gemm_dtype", "then_eager", "where_contiguous"]


def gemm_dtype(problem: Problem) -> torch.dtype:
    """The dtype of the product before the epilogue: that of out where it has more bytes than a, or a has one; else that of a."""
    wanted = problem.out.dtype
    if problem.dtype.itemsize == 1:
        return wanted
    return wanted if wanted.itemsize > problem.dtype.itemsize else problem.dtype


def where_contiguous(kernel: Kernel, problem: Problem) -> Kernel:
    """The kernel with its ``run_new`` only if torch's own result has the layout that is asked for."""
    contiguous = problem.out == Layout.contiguous(problem.out.size, problem.out.dtype)
    return kernel if contiguous else Kernel(run=kernel.run)


def then_eager(gemm: Kernel, problem: Problem, epilogue: Epilogue) -> Kernel:
    """``gemm``, then the epilogue by torch, one call for each node; the last one writes into ``out`` where it can."""
    out_dtype, fresh = problem.out.dtype, gemm.run_new
    in_place = gemm_dtype(problem) == problem.dtype == out_dtype and problem.out.row_major
    count = len(problem.operands)
    assert fresh is not None

    def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
        if in_place:
            gemm.run(out, tensors[:count], scalars)
            evaluate(epilogue, out, tensors[count:], out=out)
        else:
            evaluate(epilogue, fresh(tensors[:count], scalars), tensors[count:], out=out)

    def run_new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:
        return evaluate(epilogue, fresh(tensors[:count], scalars), tensors[count:]).to(out_dtype).contiguous()

    return Kernel(run=run, run_new=run_new)
