"""Kernels of an operator for torch's dispatch keys: devices, ``out``, autocast, fake tensors, vmap and autograd."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._functorch import autograd_function
from torch.autograd.function import _SingleLevelFunction

from .. import settings
from ..dispatch.arguments import cast_for_autocast
from ..dispatch.call import run_unchecked
from ..dispatch.checks import no_gradient
from ..dispatch.keys import key_of
from ..dispatch.ready import keep_ready, ready
from ..dispatch.scalars import usual_classes
from ..problem.gradients import gradients, grouped_op, read_by
from .schema import OPERATORS, Operator

Tensor = torch.Tensor
check: Callable[[Any, Callable[[], str]], None] = torch._check
_SHARED_BY_ROWS = ("a", "b", "scale_b", "zero_b")
"""Arguments that have nothing of their own for each row of a: where a alone has a batch, its rows may be put below each other."""


def kernel(operator: Operator) -> Callable[..., Tensor]:
    """The kernel of a device: a look-up by key, as a plain call has it, under a key of its own."""
    name, row = f"gemmtune::{operator.name}", operator.row
    order = [operator.tensors.index(operand.role) for operand in row.operands]
    order += [len(order)] * (operator.brought is not None)  # what is brought comes last in both

    def run_kernel(*tensors: Tensor | None, may_tune: bool = True, **words: Any) -> Tensor:
        given = tuple(x for i in order if i < len(tensors) and (x := tensors[i]) is not None)
        numbers = operator.numbers(words)
        scalars = tuple(numbers[scalar] for scalar in row.scalars)
        left_out = tuple(x is None for x in tensors)
        classes = usual_classes(*scalars) if scalars else ()
        options = (may_tune, left_out, classes, *(numbers[x] for x in row.options), words.get("out_dtype"))
        key = key_of(name, given, options) if classes is not None else None
        if key is not None and (plan := ready.get(key)) is not None:
            return plan.new(given, scalars)
        with _tuning(may_tune):
            result, made = run_unchecked(operator.call(tensors, words))
        if key is not None and made is not None:
            keep_ready(key, made)
        return result

    return run_kernel


def into(operator: Operator, *tensors: Tensor | None, out: Tensor, may_tune: bool = True, **words: Any) -> None:
    """The kernel of the form that writes into ``out``, whose version it counts up."""
    with _tuning(may_tune):
        run_unchecked(operator.call(tensors, words, out))


def _tuning(may_tune: bool) -> contextlib.AbstractContextManager[object]:
    """Return a context with the settings of a call."""
    return contextlib.nullcontext() if may_tune else settings.use(settings.current().never_tuning)


def refusing(operator: Operator, *tensors: Tensor | None, **words: Any) -> None:
    """The kernel before ``into`` that refuses gradients, which a call with out= does not have."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, words["out"])):
        raise RuntimeError(
            f"gemmtune::{operator.name}.out: a call with out= is not differentiable, but a tensor requires grad; leave out "
            "out=, or use torch.no_grad()"
        )
    with torch._C._AutoDispatchBelowAutograd():
        getattr(torch.ops.gemmtune, operator.name).out(*tensors, **words)


def autocast(operator: Operator, kind: str, *tensors: Tensor | None, **words: Any) -> Any:
    """The autocast kernel: cast the operands as torch does for a product, then call the operator without autocast."""
    call = operator.call(tensors, words)
    cast_for_autocast(call)
    arguments, _ = operator.arguments(call)
    with torch.autocast(kind, enabled=False):
        return operator.overload(*arguments, **words)


def fake(operator: Operator, *tensors: Tensor | None, **words: Any) -> Tensor:
    """The result's shape and dtype, for sizes that may be symbols."""
    given = operator.given(tensors)
    row = operator.row.given(given, gated=words.get("gated", ""))
    sizes: dict[str, Any] = {}
    shown = f"{operator.name}: shapes do not fit: {[list(x.shape) for x in given.values()]}"
    for operand in row.matrices:
        x = given[operand.role]
        symbols = row.symbols(operand)
        check(x.dim() == len(symbols), lambda: shown)
        halves = operand.role == "b" and bool(words.get("encoding"))
        shape = (*x.shape[:-2], 2 * x.shape[-2], x.shape[-1]) if halves else x.shape
        for symbol, size in zip(symbols, shape, strict=True):
            check(size == (1 if symbol == "1" else sizes.setdefault(symbol, size)), lambda: shown)
    a = given["a"]
    dtype = words.get("out_dtype") or row.result_dtype(a.dtype, epilogue=False)
    if operator.brought is not None and words.get("out_dtype") is None and operator.brought.follows:
        dtype = torch.promote_types(given[operator.brought.argument].dtype, torch.int32)
    return a.new_empty(tuple(row.extent(symbol, sizes) for symbol in row.out_symbols), dtype=dtype)


def batched(
    operator: Operator, info: Any, in_dims: Sequence[int | None], *tensors: Tensor | None, **words: Any
) -> tuple[Tensor, int]:
    """The rule for ``register_vmap``.

    A batch of left operands alone has its rows put below each other. A batch of dense products is a batched product. Products of
    narrow numbers and of groups, for which there is no batched operation, follow one another.
    """
    row, given = operator.row, operator.given(tensors)
    batches = {name: d for name, d in zip(operator.tensors, in_dims, strict=False) if d is not None}
    first = {name: x.movedim(batches[name], 0) if name in batches else x for name, x in given.items()}
    if [*batches] == ["a"] and not row.batched and all(name in _SHARED_BY_ROWS for name in given):
        rows = {**first, "a": first["a"].flatten(0, 1)}
        return operator.overload(*map(rows.get, operator.tensors), **words).unflatten(0, first["a"].shape[:2]), 0
    if row.quantized or row.grouped:
        slices = ({name: x[i] if name in batches else x for name, x in first.items()} for i in range(info.batch_size))
        return torch.stack([operator.overload(*map(one.get, operator.tensors), **words) for one in slices]), 0
    whole = {name: x if name in batches else x.expand(info.batch_size, *x.shape) for name, x in first.items()}
    if row.second:
        whole["inp"] = as_batch({"a": whole["c"], "b": whole["d"]}, {})
    return as_batch(whole, words), 0


def as_batch(x: Mapping[str, Tensor], words: Mapping[str, Any]) -> Tensor:
    """a @ b, with an added operand if there is one, for a batch in front; a batch behind that becomes part of it."""
    a, b, inp = x["a"], x["b"], x.get("inp")
    tensors = [a, b]
    if inp is not None:
        ones = [1] * (a.dim() - inp.dim())
        tensors.insert(0, inp.reshape(inp.shape[0], *ones, *inp.shape[1:]).expand(*a.shape[:-1], b.shape[-1]))
    name = "bmm" if inp is None else "baddbmm"
    result: Tensor = OPERATORS[name].overload(*(t.flatten(0, -3) for t in tensors), **words)
    return result.view(*a.shape[:-1], b.shape[-1])


class Following(_SingleLevelFunction):
    """The node of the graph: the operator below it, and its gradients by the rules of its row.

    ``torch.library.register_autograd`` would write the same, but out of an ``autograd.Function`` that refuses to work within
    torch.func. A function of a single level does there what torch's own kernels do: each level of a transform calls it anew.
    """

    @staticmethod
    def forward(ctx: Any, operator: Operator, keys: Any, words: dict[str, Any], *tensors: Tensor | None) -> Tensor:
        """The result. Of the tensors those are kept that the gradients are computed from."""
        # A function has gradients disabled, but the next level of a transform has its own.
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

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        """Return the key that torch's compiled autograd asks each function for."""
        return (ctx._autograd_function_id,)


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
    """mm, bmm or a grouped product. While torch.compile traces, torch's, which the compilation replaces by its own choice."""
    if offs is not None:
        return getattr(torch.ops.gemmtune, grouped_op(b))(a, b, offs)  # type: ignore[no-any-return]
    op = "bmm" if a.dim() == 3 else "mm"
    if torch._guards.TracingContext.try_get() is not None:
        return getattr(torch, op)(a, b)  # type: ignore[no-any-return]
    return getattr(torch.ops.gemmtune, op)(a, b)  # type: ignore[no-any-return]
