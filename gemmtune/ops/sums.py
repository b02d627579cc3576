"""The sum of two products: mm_plus_mm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..dispatch.call import run
from ..dispatch.calls import mm_plus_mm_call
from ..dispatch.keys import NOTHING, key_of
from ..dispatch.plan import keep_ready, ready
from .autograd import differentiable

__all__ = ["mm_plus_mm"]

Tensor = torch.Tensor


def mm_plus_mm(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    *,
    out: Tensor | None = None,
    epilogue: Callable[..., Tensor] | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Tensor:
    """out = epilogue(a @ b + c @ d, *epilogue_args)

    Args:
        a: [M, K], any strides; float64, float32, float16 or bfloat16 (other dtypes run by torch).
        b: [K, N], any strides, of the dtype of ``a``.
        c: [M, K2], any strides, of the dtype of ``a``.
        d: [K2, N], any strides, of the dtype of ``a``.
        out, epilogue, epilogue_args: as for ``mm``.

    A choice may round one of the products to the dtype of ``a`` before it adds the other one, as torch's composition
    ``torch.addmm(torch.mm(c, d), a, b)`` does.

    Returns:
        [M, N]; ``out`` if it was given.

    Raises:
        InvalidProblemError: (a RuntimeError and ValueError) operands that do not fit together.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
    """
    key = None
    compiling = torch.compiler.is_compiling()
    if out is None and epilogue is None and epilogue_args is NOTHING and not compiling:
        key = key_of("mm_plus_mm", a, b, (c, d))
        if key is not None and (plan := ready.get(key)) is not None:
            return plan.new((a, b, c, d), ())
    call = mm_plus_mm_call(a, b, c, d, out=out, epilogue=epilogue, epilogue_args=epilogue_args)
    if compiling:
        # Inside torch.compile these are torch's operations, which its compiler knows.
        return call.by_torch()
    if all(isinstance(x, Tensor) for _, x in call.inputs) and any(x.requires_grad for _, x in call.inputs):
        return differentiable(call)
    result, plan = run(call)
    if key is not None and plan is not None:
        keep_ready(key, plan)
    return result
