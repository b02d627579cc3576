"""Gradients of the operations whose row has a rule for them, through the same operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..dispatch.arguments import Call
from ..dispatch.call import refuse_out, run
from ..dispatch.calls import call_of
from ..dispatch.epilogues import traced
from ..problem.dtypes import accumulator_dtype
from ..problem.epilogue import evaluate

__all__ = ["differentiable"]


def differentiable(call: Call) -> torch.Tensor:
    """Do a call, with a gradient for every input that asks for one.

    That of what the epilogue gets comes from the epilogue's own, those of the operands from the row's rule. What the epilogue gets
    is computed again in the backward pass.
    """
    if not call.wants_grad:
        return run(call)[0]
    refuse_out(call)
    result: torch.Tensor = _Differentiable.apply(call, *call.operands.values(), *call.extra)  # type: ignore[no-untyped-call]
    return result


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return run(with_tensors(call, tensors))[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        call = with_tensors(ctx.call, ctx.saved_tensors)
        rule = call.operation.gradient
        assert callable(rule)
        grad, grads_extra = grads[0], [None] * len(call.extra)
        if call.epilogue is not None:
            grad, *grads_extra = through_epilogue(call, call.epilogue, grad)
        found = rule(grad.to(call.a.dtype), call.operands, call.scalars, product)
        wanted = zip(call.operands, ctx.needs_input_grad[1:], strict=False)
        return (None, *(found[role]() if wants else None for role, wants in wanted), *grads_extra)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """mm or bmm, differentiable again."""
    return differentiable(call_of("bmm" if a.dim() == 3 else "mm", {"a": a, "b": b}))


def through_epilogue(call: Call, function: Callable[..., torch.Tensor], grad: torch.Tensor) -> list[Any]:
    """Gradients of the accumulator and of each extra operand (None where it asks for none), given that of the result."""
    plain = replace(call, epilogue=None, extra=(), extra_names=())
    dtype, extra = accumulator_dtype(call.a.dtype), call.extra
    epilogue = traced(function, dtype, extra)
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


def with_tensors(call: Call, tensors: Sequence[torch.Tensor]) -> Call:
    """The same call on other tensors: its operands, then those of the epilogue."""
    count = len(call.operands)
    return replace(call, operands=dict(zip(call.operands, tensors[:count], strict=True)), extra=tuple(tensors[count:]))
