"""Gradients of the operators, by the rules of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import autograd_function
from torch.autograd.function import _SingleLevelFunction

from .. import settings
from ..dispatch.checks import no_gradient
from ..problem.gradients import gradients, grouped_op, read_by
from .schema import Operator

Tensor = torch.Tensor


class Following(_SingleLevelFunction):
    """The node of the graph: the operator below it, and its gradients by the rules of its row.

    ``torch.library.register_autograd`` would write the same, but out of an ``autograd.Function`` that refuses to work within
    torch.func. A function of a single level does there what torch's own kernels do: each level of a transform calls it anew.
    """

    @staticmethod
    def forward(ctx: Any, operator: Operator, keys: Any, words: dict[str, Any], *tensors: Tensor | None) -> Tensor:
        """The result. Of the tensors those are kept that the gradients are computed from."""
        # A function has gradients turned off, but the next level of a transform has its own.
        with torch.set_grad_enabled(torch._C._are_functorch_transforms_active()):
            result = _below(operator, keys, tensors, words)
        given = operator.given(tensors)
        ctx.operator, ctx.count, ctx.numbers, ctx.dtype = operator, len(tensors), operator.numbers(words), given["a"].dtype
        ctx.shapes = {name: x.shape for name, x in given.items()}
        ctx.wanted = [name for name, wants in zip(operator.tensors, ctx.needs_input_grad[3:], strict=False) if wants]
        reads = read_by(operator.row.gradient or {}, ctx.wanted)
        ctx.kept = [name for name in given if name in reads]
        ctx.save_for_backward(*(given[name] for name in ctx.kept))
        ctx.settings = settings.patched.get()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of the operands, by the rules of the row."""
        operator: Operator = ctx.operator
        rules = operator.row.gradient
        if rules is None:
            raise no_gradient(operator.name, ctx.wanted[0])
        operands = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        with settings.use(ctx.settings):  # those of the forward pass, which autograd's threads do not have
            found = gradients(rules, grads[0].to(ctx.dtype), operands, ctx.shapes, ctx.numbers, ctx.wanted, product)
        return (None, None, None, *(found.get(name) for name in operator.tensors[: ctx.count]))


def followed(operator: Operator) -> Callable[..., Tensor]:
    """The kernel of the Autograd key, which gets the key set first."""

    def follow(keys: Any, *tensors: Tensor | None, **words: Any) -> Tensor:
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            with autograd_function.enable_single_level_autograd_function():  # type: ignore[attr-defined]
                result: Tensor = Following.apply(operator, keys, words, *tensors)  # type: ignore[attr-defined]
            return result
        return _below(operator, keys, tensors, words)

    return follow


def _below(operator: Operator, keys: Any, tensors: tuple[Tensor | None, ...], words: dict[str, Any]) -> Tensor:
    """The operator's kernel for the keys below Autograd."""
    overload: Any = operator.overload
    with torch._C._AutoDispatchBelowAutograd():
        result: Tensor = overload.redispatch(keys & torch._C._after_autograd_keyset, *tensors, **words)
    return result


def product(a: Tensor, b: Tensor, offs: Tensor | None = None) -> Tensor:
    """mm or bmm; torch's while torch.compile traces a graph, where it stands for what the compilation of the graph will choose.

    With offsets the grouped product of rows or of terms.
    """
    if offs is not None:
        return getattr(torch.ops.gemmtune, grouped_op(b))(a, b, offs)  # type: ignore[no-any-return]
    op = "bmm" if a.dim() == 3 else "mm"
    if torch._guards.TracingContext.try_get() is not None:
        return getattr(torch, op)(a, b)  # type: ignore[no-any-return]
    return getattr(torch.ops.gemmtune, op)(a, b)  # type: ignore[no-any-return]
