"""Gradients of the dense operations, through the same operations."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.arguments import Call
from ..dispatch.call import run
from ..dispatch.epilogues import traced
from ..errors import InvalidProblemError
from ..problem.dtypes import accumulator_dtype
from ..problem.epilogue import evaluate

__all__ = ["differentiable"]


def differentiable(call: Call) -> torch.Tensor:
    """Do a call, with a gradient for every input that asks for one.

    For y = f(alpha · a @ b + beta · inp) and g the gradient of the argument of f: grad a = alpha · g @ bᵀ, grad b = alpha · aᵀ @ g,
    grad inp = beta · g summed over what was broadcast; for y = f(a @ b + c @ d) also grad c = g @ dᵀ, grad d = cᵀ @ g. The argument
    of f is computed again in the backward pass.
    """
    if not call.needs_grad:
        return run(call)[0]
    if call.out is not None:
        raise InvalidProblemError(
            f"{call.op}: a call with out= is not differentiable, but an input requires grad; leave out out=, or use torch.no_grad()"
        )
    result: torch.Tensor = _Differentiable.apply(  # type: ignore[no-untyped-call]
        call, call.a, call.b, call.inp, call.c, call.d, *call.extra
    )
    return result


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor | None) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return run(with_operands(call, *tensors))[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        call: Call = ctx.call
        a, b, inp, c, d, *extra = ctx.saved_tensors
        grad, grads_extra = grads[0], [None] * len(extra)
        if call.epilogue is not None:
            grad, *grads_extra = through_epilogue(call, [a, b, inp, c, d], extra, grad)
        grad = grad.to(a.dtype)
        scaled = grad if call.alpha == 1 else grad * call.alpha
        _, need_a, need_b, need_inp, need_c, need_d, *_ = ctx.needs_input_grad
        grad_a = product(scaled, b.mT) if need_a else None
        grad_b = product(a.mT, scaled) if need_b else None
        grad_inp = (grad * call.beta).sum_to_size(inp.shape) if need_inp else None
        grad_c = product(grad, d.mT) if need_c else None
        grad_d = product(c.mT, grad) if need_d else None
        return (None, grad_a, grad_b, grad_inp, grad_c, grad_d, *grads_extra)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """mm or bmm, differentiable again."""
    return differentiable(Call(op="bmm" if a.dim() == 3 else "mm", a=a, b=b))


def through_epilogue(call: Call, operands: list[torch.Tensor | None], extra: list[torch.Tensor], grad: torch.Tensor) -> list[Any]:
    """Gradients of the accumulator and of each extra operand (None where it asks for none), given that of the result.

    ``operands`` are those of ``with_operands`` before ``extra``.
    """
    plain = with_operands(call, *operands)
    plain.epilogue = None
    dtype = accumulator_dtype(plain.a.dtype)
    epilogue = traced(call.epilogue, dtype, extra)  # type: ignore[arg-type]
    with torch.enable_grad():
        acc = differentiable(plain).to(dtype)
        if not acc.requires_grad:
            acc = acc.detach().requires_grad_()
        value = evaluate(epilogue, acc, extra)
    wanted = [x for x in extra if x.requires_grad]
    found: list[torch.Tensor | None] = list(
        torch.autograd.grad(value, [acc, *wanted], grad.to(value.dtype), create_graph=torch.is_grad_enabled(), allow_unused=True)
    )
    first = found.pop(0)
    return [torch.zeros_like(acc) if first is None else first, *(found.pop(0) if x.requires_grad else None for x in extra)]


def with_operands(call: Call, *tensors: Any) -> Call:
    """The same call on other tensors: a, b, inp, c, d, and then those of the epilogue."""
    a, b, inp, c, d, *extra = tensors
    return Call(
        op=call.op,
        a=a,
        b=b,
        packed=call.packed,
        inp=inp,
        c=c,
        d=d,
        alpha=call.alpha,
        beta=call.beta,
        epilogue=call.epilogue,
        extra=tuple(extra),
    )
