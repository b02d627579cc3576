"""Problems as callers write them: one call of gemmtune, and the same by torch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

import gemmtune
from gemmtune.numerics.operands import Operands
from gemmtune.problem import Problem
from gemmtune.problem.compositions import dequantized

__all__ = ["Call", "arguments", "gemmtune_call", "torch_call"]

Call = Callable[..., torch.Tensor]
"""``call(a, b, inp, alpha, beta, extra)``, with c and d, or the scales, at the head of ``extra`` as kernels get them."""


def arguments(operands: Operands) -> tuple[object, ...]:
    """What a ``Call`` is called with."""
    return operands.a, operands.b, operands.inp, operands.alpha, operands.beta, operands.trailing


def gemmtune_call(problem: Problem) -> Call:
    """The public operation. An epilogue that an operation brings along is a part of it: the factor of int_mm_mul, a bias."""
    out_dtype, encoding, fused = problem.out.dtype, problem.encoding, problem.epilogue is not None
    match problem.op:
        case "mm" | "bmm":
            product = getattr(gemmtune, problem.op)
            return lambda a, b, *_: product(a, b)
        case "addmm" | "baddbmm":
            total = getattr(gemmtune, problem.op)
            return lambda a, b, inp, alpha, beta, _: total(inp, a, b, alpha=alpha, beta=beta)
        case "mm_plus_mm":
            return lambda a, b, _inp, _alpha, _beta, extra: gemmtune.mm_plus_mm(a, b, extra[0], extra[1])
        case "int_mm" if fused:
            return lambda a, b, _inp, _alpha, _beta, extra: gemmtune.int_mm_mul(a, b, extra[0], out_dtype=out_dtype)
        case "int_mm":
            return lambda a, b, *_: gemmtune.int_mm(a, b)
        case "mixed_mm":
            return lambda a, b, _inp, _alpha, _beta, extra: gemmtune.mixed_mm(a, b, **_weights(extra), encoding=encoding)
    fast = problem.fast_accum
    return lambda a, b, _inp, _alpha, _beta, extra: gemmtune.scaled_mm(
        a, b, extra[0], extra[1], bias=extra[2] if fused else None, out_dtype=out_dtype, fast_accum=fast
    )


def torch_call(problem: Problem) -> Call:
    """The operation as a caller without gemmtune writes it. What torch refuses (small or odd sizes) it refuses here too."""
    out_dtype, fused, fast, encoding = problem.out.dtype, problem.epilogue is not None, problem.fast_accum, problem.encoding
    match problem.op:
        case "mm" | "bmm":
            product = getattr(torch, problem.op)
            return lambda a, b, *_: product(a, b)
        case "addmm" | "baddbmm":
            total = getattr(torch, problem.op)
            return lambda a, b, inp, alpha, beta, _: total(inp, a, b, alpha=alpha, beta=beta)
        case "mm_plus_mm":
            return lambda a, b, _inp, _alpha, _beta, extra: torch.addmm(torch.mm(extra[0], extra[1]), a, b)
        case "int_mm" if fused:
            return lambda a, b, _inp, _alpha, _beta, extra: (torch._int_mm(a, b) * extra[0]).to(out_dtype)
        case "int_mm":
            return lambda a, b, *_: torch._int_mm(a, b)
        case "mixed_mm":
            return lambda a, b, _inp, _alpha, _beta, extra: torch.mm(
                a, dequantized(b, *_weights(extra).values(), encoding, a.dtype)
            )
    return lambda a, b, _inp, _alpha, _beta, extra: torch._scaled_mm(
        a, b, extra[0], extra[1], bias=extra[2] if fused else None, out_dtype=out_dtype, use_fast_accum=fast
    )


def _weights(extra: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor | None]:
    """The scales of mixed_mm by name."""
    scale, zero, *_ = (*extra, None, None)
    return {"scale_b": scale, "zero_b": zero}
