"""Gradients of each operand of an operation, given the gradient of the epilogue's input."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .compositions import dequantized

Tensor = torch.Tensor
Product = Callable[..., Tensor]
"""A differentiable product: mm or bmm of two operands, or with offsets the grouped product that fits their dimensions.

The rules of a block-sparse product pass sparse_bsr tensors: ``product(g, weight)`` is g @ weight, and ``product(x, y, weight)`` is
x @ y at the blocks of the weight, which is a gradient of the weight.
"""


class Rule(NamedTuple):
    """The gradient of one operand: the roles that it reads and the function that computes it.

    The backward pass keeps only the operands in ``reads``. In ``of(g, operands, numbers, product)``, ``numbers`` are the call's
    scalars and options by name. ``gradients`` sums over broadcast dimensions afterwards.
    """

    reads: tuple[str, ...]
    of: Callable[[Tensor, Mapping[str, Tensor], Mapping[str, Any], Product], Tensor]


Gradient = Mapping[str, Rule]
"""A rule for each operand, by role."""


def _left(other: str) -> Rule:
    return Rule((other,), lambda g, x, numbers, product: product(_scaled(g, numbers), x[other].mH))


def _right(other: str) -> Rule:
    return Rule((other,), lambda g, x, numbers, product: product(x[other].mH, _scaled(g, numbers)))


def _scaled(g: Tensor, numbers: Mapping[str, Any]) -> Tensor:
    alpha = numbers.get("alpha", 1)
    return g if alpha == 1 else g * alpha


def _widened(g: Tensor, x: Mapping[str, Tensor], numbers: Mapping[str, Any], product: Product) -> Tensor:
    """Return grad a = g @ wᵀ for the dequantized weight w of b, scale_b and zero_b."""
    weight = dequantized(x["b"], x.get("scale_b"), x.get("zero_b"), numbers["encoding"], g.dtype)
    return product(g, weight.mT)


def _of_part(role: str) -> Rule:
    """Return the rule for one part of a weight: the weight's gradient aᵀ @ g, taken back through the dequantization."""

    def of(g: Tensor, x: Mapping[str, Tensor], numbers: Mapping[str, Any], product: Product) -> Tensor:
        def weight(part: Tensor) -> Tensor:
            parts = {**x, role: part}
            return dequantized(parts["b"], parts.get("scale_b"), parts.get("zero_b"), numbers["encoding"], g.dtype)

        (found,) = torch.func.vjp(weight, x[role])[1](product(x["a"].mT, g))
        return found  # type: ignore[no-any-return]

    return Rule(("a", "b", "scale_b", "zero_b"), of)


of_product: Gradient = {"a": _left("b"), "b": _right("a")}
"""The gradients of a @ b: grad a = g @ bᴴ, grad b = aᴴ @ g."""
of_sum: Gradient = {**of_product, "inp": Rule((), lambda g, x, numbers, product: g * numbers["beta"])}  # noqa: ARG005
"""The gradients of alpha · a @ b + beta · inp: the product's gradients times alpha, and grad inp = beta · g."""
of_two_products: Gradient = {**of_product, "c": _left("d"), "d": _right("c")}
"""The gradients of a @ b + c @ d: also grad c = g @ dᴴ, grad d = cᴴ @ g."""
of_widened: Gradient = {
    "a": Rule(("b", "scale_b", "zero_b"), _widened),
    **{role: _of_part(role) for role in ("b", "scale_b", "zero_b")},
}
"""The gradients of a @ ((b - zero_b) · scale_b)."""
of_grouped: Gradient = {
    "a": Rule(("b", "offs"), lambda g, x, numbers, product: product(g, x["b"].mT, x["offs"])),  # noqa: ARG005
    "b": Rule(("a", "offs"), lambda g, x, numbers, product: product(x["a"].mT, g, x["offs"])),  # noqa: ARG005
}
"""The gradients of a @ b[g] over groups of rows: grad a = g @ bᵀ of the same groups, grad b = aᵀ @ g over each group of terms."""
of_grouped_terms: Gradient = {
    "a": Rule(("b", "offs"), lambda g, x, numbers, product: product(x["b"], g.mT, x["offs"]).mT),  # noqa: ARG005
    "b": Rule(("a", "offs"), lambda g, x, numbers, product: product(x["a"].mT, g, x["offs"])),  # noqa: ARG005
}
"""The gradients of a @ b over each group of terms. The terms are rows of b and of aᵀ, so both gradients multiply groups of rows
by one matrix for each group."""


of_blocks: Gradient = {
    "a": Rule(("b",), lambda g, x, numbers, product: product(_scaled(g, numbers), x["b"])),
    "b": Rule(("a", "b"), lambda g, x, numbers, product: product(_scaled(g, numbers).mT, x["a"], x["b"])),
}
"""The gradients of a @ wᵀ for a block-sparse w, which takes the place of b: grad a = g @ w, grad w = gᵀ @ a at the blocks of w."""
of_block_sum: Gradient = {**of_blocks, "inp": of_sum["inp"]}
"""The gradients of alpha · a @ wᵀ + beta · inp for a block-sparse w."""


def grouped_op(b: Tensor) -> str:
    """Return the grouped operation for a right operand ``b``: 3-D means a matrix for each group of rows, 2-D groups of terms."""
    return "grouped_mm" if b.dim() == 3 else "grouped_k_mm"


def read_by(rules: Gradient, wanted: Iterable[str]) -> set[str]:
    """Return the operands that the gradients of ``wanted`` read."""
    return {role for name in wanted if name in rules for role in rules[name].reads}


def gradients(
    rules: Gradient,
    g: Tensor,
    operands: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    numbers: Mapping[str, Any],
    wanted: Collection[str],
    product: Product,
) -> dict[str, Tensor]:
    """Return the gradients of the operands in ``wanted``, by role, each with its shape in ``shapes``."""
    found = {role: rule.of(g, operands, numbers, product) for role, rule in rules.items() if role in wanted}
    return {role: x if x.shape == shapes[role] else x.sum_to_size(shapes[role]) for role, x in found.items()}


def epilogue_gradients(
    epilogue: Callable[..., Tensor], acc: Tensor, extra: Sequence[Tensor], wants: Sequence[bool], g: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the gradients of ``epilogue(acc, *extra)`` with respect to each of its arguments, the others held fixed.

    An operand of the epilogue may be an operand of the product too, or a view, an ancestor or a repetition of one. Its gradient
    here is that of its place in the epilogue alone; autograd adds up the places. So each argument enters through a fresh tensor:
    detached, or an alias with a node of its own where the gradients must be differentiable again (grad mode is on).

    Args:
        epilogue: the pointwise function.
        acc: the result of the product, in the accumulator's dtype.
        extra: the further operands of the epilogue.
        wants: for each operand of ``extra``, True if its gradient is needed.
        g: the gradient of the epilogue's result.

    Returns:
        The gradient of ``acc``, and for each operand of ``extra`` its gradient (None where it is not wanted or there is none).
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        first, *rest = (
            x.view_as(x) if again and x.requires_grad else x.detach().requires_grad_(wanted)
            for x, wanted in zip((acc, *extra), (True, *wants), strict=True)
        )
        value = epilogue(first, *rest)
    asked = [first, *(x for x, wanted in zip(rest, wants, strict=True) if wanted)]
    of_acc, *found = (
        torch.autograd.grad(value, asked, g.to(value.dtype), create_graph=again, allow_unused=True)
        if value.requires_grad  # an epilogue may depend on none of them, such as a comparison
        else (None,) * len(asked)
    )
    left = iter(found)
    return torch.zeros_like(acc) if of_acc is None else of_acc, [next(left) if wanted else None for wanted in wants]
