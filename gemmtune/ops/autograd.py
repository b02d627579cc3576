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

    For y = f(alpha · a @ b + beta · c) and g the gradient of the argument of f: grad a = alpha · g @ bᵀ, grad b = alpha · aᵀ @ g,
    grad c = beta · g summed over what was broadcast. The argument of f is computed again in the backward pass.
    """
    if not call.needs_grad:
        return run(call)[0]
    if call.out is not None:
        raise InvalidProblemError(
            f"{call.op}: a call with out= is not differentiable, but an input requires grad; leave out out=, or use torch.no_grad()"
        )
    result: torch.Tensor = _Differentiable.apply(call, call.a, call.b, call.inp, *call.extra)  # type: ignore[no-untyped-call]
    return result


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor | None) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        a, b, inp, *extra = tensors
        assert a is not None
        assert b is not None
        return run(with_operands(call, a, b, inp, extra))[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        call: Call = ctx.call
        a, b, inp, *extra = ctx.saved_tensors
        grad, grads_extra = grads[0], [None] * len(extra)
        if call.epilogue is not None:
            grad, *grads_extra = through_epilogue(call, a, b, inp, extra, grad)
        grad = grad.to(a.dtype)
        scaled = grad if call.alpha == 1 else grad * call.alpha
        product = "bmm" if a.dim() == 3 else "mm"
        _, need_a, need_b, need_inp, *_ = ctx.needs_input_grad
        grad_a = differentiable(Call(op=product, a=scaled, b=b.mT)) if need_a else None  # type: ignore[arg-type]
        grad_b = differentiable(Call(op=product, a=a.mT, b=scaled)) if need_b else None  # type: ignore[arg-type]
        grad_inp = (grad * call.beta).sum_to_size(inp.shape) if need_inp else None
        return (None, grad_a, grad_b, grad_inp, *grads_extra)


def through_epilogue(
    call: Call, a: torch.Tensor, b: torch.Tensor, inp: torch.Tensor | None, extra: list[torch.Tensor], grad: torch.Tensor
) -> list[Any]:
    """Gradients of the accumulator and of each extra operand (None where it asks for none), given that of the result."""
    plain = with_operands(call, a, b, inp, [])
    plain.epilogue = None
    dtype = accumulator_dtype(a.dtype)
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


def with_operands(
    call: Call, a: torch.Tensor, b: torch.Tensor, inp: torch.Tensor | None, extra: list[Any] | tuple[Any, ...]
) -> Call:
    """The same call on other tensors."""
    return Call(
        op=call.op,
        a=a,
        b=b,
        packed=call.packed,
        inp=inp,
        alpha=call.alpha,
        beta=call.beta,
        epilogue=call.epilogue,
        extra=tuple(extra),
    )
