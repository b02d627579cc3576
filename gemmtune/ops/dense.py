"""The dense operations: mm, addmm, bmm, baddbmm.

Each looks for a plan under a key that it can read off the operands in about a microsecond; everything else (checks, gradients,
tuning) is on the path of calls that have no plan yet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch.autograd import forward_ad

from .. import settings
from ..dispatch.call import Call, run
from ..dispatch.fallback import torch_call
from ..dispatch.plan import keep_ready, ready
from ..dispatch.prepack import PackedOperand
from ..errors import InvalidProblemError
from ..problem.precision import flags_token
from ..problem.problem import Op, scalar_class
from .autograd import differentiable

__all__ = ["addmm", "baddbmm", "bmm", "mm"]

Tensor = torch.Tensor
EpilogueFunction = Callable[..., Tensor]
_NO_EXTRA: tuple[Tensor, ...] = ()


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
        return torch_call(op, a, _tensor(b), inp, alpha, beta, out, epilogue, tuple(epilogue_args))
    key = None
    if out is None and epilogue is None:
        key = _key(op, a, b, inp, alpha, beta)
        if key is not None and (plan := ready.get(key)) is not None:
            operand = b.for_choice(plan.choice) if b.__class__ is PackedOperand else b
            return plan.new(a, operand, inp, alpha, beta, _NO_EXTRA)
    return _planned(key, op, a, b, inp, alpha, beta, out, epilogue, epilogue_args)


def _key(op: Op, a: Tensor, b: Tensor | PackedOperand, inp: Tensor | None, alpha: float, beta: float) -> Hashable | None:
    """Everything that a plan depends on; None for a call that must be looked at more closely.

    Every call pays for this, and each attribute of a tensor costs 50 to 100 ns: nothing is read that is not needed.
    """
    packed = b.__class__ is PackedOperand
    try:
        t: Tensor = b.tensor if packed else b  # type: ignore[union-attr,assignment]
        if (a.requires_grad or t.requires_grad or (inp is not None and inp.requires_grad)) and torch.is_grad_enabled():
            return None
        if a.is_neg() or t.is_neg() or forward_ad._current_level >= 0 or torch._C._is_any_autocast_enabled():
            return None
        index, dtype = a.get_device(), a.dtype
        flags = None
        if index >= 0:
            if index != torch._C._cuda_getDevice():
                return None
            flags = flags_token(dtype)
        alignment = (a.data_ptr() & 15) << 4 | (t.data_ptr() & 15)
        key = (
            a.shape, t.shape, a.stride(), t.stride(), dtype, t.dtype, alignment, index, t.get_device(), settings.token(), flags,
            op, packed, a.__class__, t.__class__,
        )  # fmt: skip
        if inp is None:
            return key
        if inp.is_neg() or inp.get_device() != index:  # a scalar of another device is moved, which no plan does
            return None
        added = (inp.__class__, inp.shape, inp.stride(), inp.dtype, inp.data_ptr() & 15)
        return (*key, *added, scalar_class(alpha), scalar_class(beta))
    except (AttributeError, RuntimeError):
        # No tensor at all, or one without memory of its own (a torch.func transform): the checks say what is wrong.
        return None


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
    call = Call(
        op=op,
        a=a,
        b=_tensor(b),
        packed=b if isinstance(b, PackedOperand) else None,
        inp=inp,
        alpha=alpha,
        beta=beta,
        out=out,
        epilogue=epilogue,
        extra=tuple(epilogue_args),
    )
    if op in ("bmm", "baddbmm") and call.packed is not None:
        raise InvalidProblemError(f"{op}: b must be a torch.Tensor, got a prepacked operand; mm and addmm take those")
    if epilogue_args and epilogue is None:
        raise InvalidProblemError(f"{op}: got {len(call.extra)} epilogue_args without an epilogue")
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


def _tensor(b: Tensor | PackedOperand) -> Tensor:
    return b.tensor if isinstance(b, PackedOperand) else b
