"""Gradients of operations: of each operand, given that of what the epilogue gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Tensor = torch.Tensor
Product = Callable[[Tensor, Tensor], Tensor]
"""mm or bmm, differentiable again."""
Gradient = Callable[[Tensor, Mapping[str, Tensor], tuple[float, ...], Product], Mapping[str, Callable[[], Tensor]]]
"""``gradient(g, operands, scalars, product)``: for each operand, by role, what computes its gradient if it is wanted."""


def of_product(g: Tensor, x: Mapping[str, Tensor], scalars: tuple[float, ...], product: Product) -> dict[str, Callable[[], Tensor]]:  # noqa: ARG001
    """The gradients of a @ b: that of a is g @ bᵀ, that of b is aᵀ @ g."""
    return {"a": lambda: product(g, x["b"].mT), "b": lambda: product(x["a"].mT, g)}


def of_sum(g: Tensor, x: Mapping[str, Tensor], scalars: tuple[float, ...], product: Product) -> dict[str, Callable[[], Tensor]]:
    """The gradients of alpha · a @ b + beta · inp: the product's times alpha, and beta · g summed over what was broadcast."""
    alpha, beta = scalars
    scaled = g if alpha == 1 else g * alpha
    return {**of_product(scaled, x, scalars, product), "inp": lambda: (g * beta).sum_to_size(x["inp"].shape)}


def of_two_products(
    g: Tensor, x: Mapping[str, Tensor], scalars: tuple[float, ...], product: Product
) -> dict[str, Callable[[], Tensor]]:
    """The gradients of a @ b + c @ d: those of a @ b, that of c is g @ dᵀ, that of d is cᵀ @ g."""
    return {**of_product(g, x, scalars, product), "c": lambda: product(g, x["d"].mT), "d": lambda: product(x["c"].mT, g)}
