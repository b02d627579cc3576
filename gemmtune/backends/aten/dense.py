"""mm, addmm, bmm and baddbmm by torch, and the products in wider dtypes that an epilogue may ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...choice import Kernel, Scalars, Tensors
from ...problem import Problem
from .eager import gemm_dtype, then_eager, where_contiguous

__all__ = ["kernel_of", "product_kernel"]


def kernel_of(problem: Problem, aten_name: str, kwargs: Mapping[str, str]) -> Kernel:
    """The calls for a dense problem. ``bias`` among the keywords says how addmm gets it: as a ``vector`` or a ``matrix``."""
    if gemm_dtype(problem) != problem.dtype:
        kernel = _wide(problem)
    elif aten_name in ("mm", "bmm"):
        kernel = _product(getattr(torch, aten_name))
    else:
        kernel = _scaled(getattr(torch, aten_name), _bias_view(problem, kwargs.get("bias")))
    if problem.epilogue is not None:
        kernel = then_eager(kernel, problem, problem.epilogue)
    return where_contiguous(kernel, problem)


def product_kernel(problem: Problem) -> Kernel:
    """a @ b of two matrices of a's dtype, in the dtype that the problem's result asks for, without the epilogue."""
    return _wide(problem) if gemm_dtype(problem) != problem.dtype else _product(torch.mm)


def _bias_view(problem: Problem, form: str | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    match form:
        case "vector":
            return lambda inp: inp if inp.dim() == 1 else inp[0]
        case "matrix":
            size = problem.out.size
            return lambda inp: inp.expand(size)
    return None


def _product(function: Callable[..., torch.Tensor]) -> Kernel:
    """a @ b by torch.mm or torch.bmm."""

    def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:  # noqa: ARG001
        a, b = tensors
        function(a, b, out=out)

    def run_new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:  # noqa: ARG001
        a, b = tensors
        return function(a, b)

    return Kernel(run=run, run_new=run_new)


def _scaled(function: Callable[..., torch.Tensor], view: Callable[[torch.Tensor], torch.Tensor] | None) -> Kernel:
    """alpha · a @ b + beta · view(inp) by torch.addmm or torch.baddbmm."""

    def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
        (a, b, inp), (alpha, beta) = tensors, scalars
        function(inp if view is None else view(inp), a, b, beta=beta, alpha=alpha, out=out)

    def run_new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:
        (a, b, inp), (alpha, beta) = tensors, scalars
        return function(inp if view is None else view(inp), a, b, beta=beta, alpha=alpha)

    return Kernel(run=run, run_new=run_new)


def _wide(problem: Problem) -> Kernel:
    """The product in a dtype wider than the inputs': torch's ``out_dtype`` where cuBLAS has that, else on converted inputs."""
    dtype = gemm_dtype(problem)
    function: Callable[..., torch.Tensor] = torch.bmm if problem.batched else torch.mm
    direct = _has_out_dtype(problem)

    def run_new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:
        a, b, *added = tensors
        result = function(a, b, out_dtype=dtype) if direct else function(a.to(dtype), b.to(dtype))
        if added:
            alpha, beta = scalars
            if alpha != 1:
                result *= alpha
            if beta != 0:
                result.add_(added[0], alpha=beta)
        return result

    def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
        out.copy_(run_new(tensors, scalars))

    return Kernel(run=run, run_new=run_new)


def _has_out_dtype(problem: Problem) -> bool:
    """cuBLAS multiplies 16-bit inputs into float32 (torch.mm's and torch.bmm's ``out_dtype``)."""
    return problem.device_type == "cuda" and torch.version.hip is None and gemm_dtype(problem) == torch.float32
