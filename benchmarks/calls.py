"""Problems as callers write them: one call of gemmtune, and the same by torch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

import gemmtune
from gemmtune.choice import Scalars, Tensors
from gemmtune.numerics.operands import Operands
from gemmtune.problem import Problem
from gemmtune.problem.compositions import dequantized
from gemmtune.problem.grouped_compositions import combined, routed, widened

__all__ = ["Call", "arguments", "gemmtune_call", "torch_call"]

Call = Callable[[Tensors, Scalars], torch.Tensor]
"""``call(tensors, scalars)``, as kernels get them."""


def arguments(operands: Operands) -> tuple[Tensors, Scalars]:
    """What a ``Call`` is called with."""
    return operands.tensors, operands.scalars


def gemmtune_call(problem: Problem) -> Call:
    """The public operation. An epilogue that an operation brings along is a part of it: the factor of int_mm_mul, a bias."""
    out_dtype, encoding, fused, fast = problem.out.dtype, problem.encoding, problem.epilogue is not None, problem.fast_accum
    match problem.op:
        case "addmm" | "baddbmm":
            total = getattr(gemmtune, problem.op)
            return lambda x, s: total(x[2], x[0], x[1], alpha=s[0], beta=s[1])
        case "int_mm" if fused:
            return lambda x, _: gemmtune.int_mm_mul(*x, out_dtype=out_dtype)
        case "mixed_mm":
            return lambda x, _: gemmtune.mixed_mm(x[0], x[1], **_weights(x), encoding=encoding)
        case "scaled_mm":
            return lambda x, _: gemmtune.scaled_mm(*x[:4], bias=x[4] if fused else None, out_dtype=out_dtype, fast_accum=fast)
        case "mixed_grouped_mm":
            return lambda x, _: gemmtune.mixed_grouped_mm(*x, encoding=encoding)
        case "bsr_mm":
            return lambda x, _: gemmtune.bsr_mm(x[1], x[0].t(), out=_turned_out(problem, x[0])).t()
        case "bsr_addmm":
            return lambda x, s: gemmtune.bsr_addmm(
                x[2].t(), x[1], x[0].t(), alpha=s[0], beta=s[1], out=_turned_out(problem, x[0])
            ).t()
        case "routed_grouped_mm":
            return lambda x, _: gemmtune.grouped_mm(*x[:3], rows=x[3] if problem.rows else None, gated=problem.gated)
        case "combined_grouped_mm":
            return lambda x, _: gemmtune.grouped_mm(*x[:3], scatter=(x[3], x[4]))
        case "scaled_grouped_mm":
            return lambda x, _: gemmtune.scaled_grouped_mm(*x, out_dtype=out_dtype, fast_accum=fast)
        case _ if problem.groups:
            return lambda x, _: gemmtune.grouped_mm(*x)
    function = getattr(gemmtune, problem.op)
    return lambda x, _: function(*x)


def torch_call(problem: Problem) -> Call:
    """The operation as a caller without gemmtune writes it. What torch refuses (small or odd sizes) it refuses here too."""
    out_dtype, fused, fast, encoding = problem.out.dtype, problem.epilogue is not None, problem.fast_accum, problem.encoding
    match problem.op:
        case "addmm" | "baddbmm":
            total = getattr(torch, problem.op)
            return lambda x, s: total(x[2], x[0], x[1], alpha=s[0], beta=s[1])
        case "mm_plus_mm":
            return lambda x, _: torch.addmm(torch.mm(x[2], x[3]), x[0], x[1])
        case "int_mm" if fused:
            return lambda x, _: (torch._int_mm(x[0], x[1]) * x[2]).to(out_dtype)
        case "int_mm":
            return lambda x, _: torch._int_mm(*x)
        case "mixed_mm":
            return lambda x, _: torch.mm(x[0], dequantized(x[1], *_weights(x).values(), encoding, x[0].dtype))
        case "scaled_mm":
            return lambda x, _: torch._scaled_mm(*x[:4], bias=x[4] if fused else None, out_dtype=out_dtype, use_fast_accum=fast)
        case "bsr_mm":
            return lambda x, _: torch.mm(x[1], x[0].t()).t()
        case "routed_grouped_mm":
            return lambda x, _: routed(*x[:3], x[3] if problem.rows else None, problem.gated)
        case "combined_grouped_mm":
            return lambda x, _: combined(*x)
        case "scaled_grouped_mm":  # which takes scales of rows and columns, as vectors
            return lambda x, _: torch._scaled_grouped_mm(
                *x[:2], x[2].squeeze(1), x[3].squeeze(1), offs=x[4], out_dtype=out_dtype, use_fast_accum=fast
            )
        case _ if problem.groups:
            return lambda x, _: torch._grouped_mm(x[0], _experts(x, encoding), offs=x[-1])
    function = getattr(torch, problem.op)
    return lambda x, _: function(*x)


def _turned_out(problem: Problem, x: torch.Tensor) -> torch.Tensor | None:
    """The transpose of a result as the problem has it, where that is not what the operation makes by itself."""
    m, n = problem.out.size
    return x.new_empty(m, n, dtype=problem.out.dtype).t() if problem.out.row_major else None


def _experts(tensors: Tensors, encoding: str) -> torch.Tensor:
    """The matrices of all groups, made of narrow ones where those are given."""
    return tensors[1] if len(tensors) == 3 else widened(tensors[1], tensors[2], encoding, tensors[0].dtype)


def _weights(tensors: Tensors) -> dict[str, torch.Tensor | None]:
    """The scales of mixed_mm by name."""
    _, _, scale, zero, *_ = (*tensors, None, None)
    return {"scale_b": scale, "zero_b": zero}
