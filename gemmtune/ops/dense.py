"""The dense operations: mm, addmm, bmm, baddbmm.

Each looks for a plan under a key that it can read off the operands in about a microsecond; everything else (checks, gradients,
tuning) is on the path of calls that have no plan yet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from ..dispatch.call import run
from ..dispatch.calls import product_call, sum_call, tensor_of
from ..dispatch.fallback import torch_call
from ..dispatch.keys import NOTHING, key_of
from ..dispatch.plan import keep_ready, ready
from ..dispatch.prepack import PackedOperand
from ..problem.operations import Op
from ..problem.problem import scalar_class
from .autograd import differentiable

__all__ = ["addmm", "baddbmm", "bmm", "mm"]

Tensor = torch.Tensor
EpilogueFunction = Callable[..., Tensor]
_NUMBERS = (int, float)


def mm(
    a: Tensor,
    b: Tensor | PackedOperand,
    *,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Tensor:
    """out = epilogue(a @ b, *epilogue_args)

    Args:
        a: [M, K], any strides; float64, float32, float16 or bfloat16 (other dtypes run by torch).
        b: [K, N], any strides, of the dtype of ``a``; or a ``prepack``-ed operand.
        out: [M, N], any strides without overlap, sharing no memory with what is read.
        epilogue: a pointwise torch function of the product, computed in float32 (float64 for float64) and rounded once. If its
            last step is a cast, that is the dtype of the result; otherwise it is the dtype of ``a``.
        epilogue_args: tensors that broadcast to [M, N], given to ``epilogue`` after the product.

    Returns:
        [M, N]; ``out`` if it was given.

    Raises:
        InvalidProblemError: (a RuntimeError and ValueError) operands that do not fit together.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
    """
    return _call("mm", a, b, None, 1, 0, out, epilogue, epilogue_args)


def bmm(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Tensor:
    """out = epilogue(a @ b, *epilogue_args) for a batch: a [B, M, K], b [B, K, N], out [B, M, N]. The rest is as for ``mm``."""
    return _call("bmm", a, b, None, 1, 0, out, epilogue, epilogue_args)


def addmm(
    inp: Tensor,
    a: Tensor,
    b: Tensor | PackedOperand,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Tensor:
    """out = epilogue(beta · inp + alpha · a @ b, *epilogue_args)

    ``inp`` broadcasts to [M, N] and has the dtype of ``a``; ``out`` may be ``inp`` itself. With ``beta`` zero, NaN and infinity in
    ``inp`` do not reach the result. The rest is as for ``mm``.
    """
    return _call("addmm", a, b, inp, alpha, beta, out, epilogue, epilogue_args)


def baddbmm(
    inp: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Tensor:
    """out = epilogue(beta · inp + alpha · a @ b, *epilogue_args) for a batch: ``inp`` broadcasts to [B, M, N]; as ``addmm``."""
    return _call("baddbmm", a, b, inp, alpha, beta, out, epilogue, epilogue_args)


def _call(
    op: Op,
    a: Tensor,
    b: Tensor | PackedOperand,
    inp: Tensor | None,
    alpha: float,
    beta: float,
    out: Tensor | None,
    epilogue: EpilogueFunction | None,
    epilogue_args: Sequence[Tensor],
) -> Tensor:
    if torch.compiler.is_compiling():
        # Inside torch.compile these are torch's operations, which its compiler knows.
        return torch_call(op, a, tensor_of(b), inp, alpha, beta, out, epilogue, tuple(epilogue_args))
    key = None
    plain = out is None and epilogue is None and epilogue_args is NOTHING
    if plain and alpha.__class__ in _NUMBERS and beta.__class__ in _NUMBERS:
        key = key_of(op, a, b) if inp is None else key_of(op, a, b, (inp,), (scalar_class(alpha), scalar_class(beta)))
        if key is not None and (plan := ready.get(key)) is not None:
            operand = b.for_choice(plan.choice) if isinstance(b, PackedOperand) else b
            return plan.new((a, operand), ()) if inp is None else plan.new((a, operand, inp), (alpha, beta))
    return _planned(key, op, a, b, inp, alpha, beta, out, epilogue, epilogue_args)


def _planned(
    key: Hashable | None,
    op: Op,
    a: Tensor,
    b: Tensor | PackedOperand,
    inp: Tensor | None,
    alpha: float,
    beta: float,
    out: Tensor | None,
    epilogue: EpilogueFunction | None,
    epilogue_args: Sequence[Tensor],
) -> Tensor:
    if inp is None:
        call = product_call(op, a, b, out=out, epilogue=epilogue, epilogue_args=epilogue_args)
    else:
        call = sum_call(op, inp, a, b, beta=beta, alpha=alpha, out=out, epilogue=epilogue, epilogue_args=epilogue_args)
    if (
        isinstance(a, Tensor)
        and isinstance(call.b, Tensor)
        and any(isinstance(x, Tensor) and x.requires_grad for _, x in call.inputs)
    ):
        return differentiable(call)
    result, plan = run(call)
    if key is not None and plan is not None:
        keep_ready(key, plan)
    return result
