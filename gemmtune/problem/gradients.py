"""Gradients of operations: of each operand, given that of what the epilogue gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

__all__ = ["Gradient", "Product", "of_product", "of_sum", "of_two_products"]

Tensor = torch.Tensor
Product = Callable[[Tensor, Tensor], Tensor]
"""mm or bmm, differentiable again."""
Gradient = Callable[[Tensor, Mapping[str, Tensor], tuple[float, ...], Product], Mapping[str, Callable[[], Tensor]]]
"""``gradient(g, operands, scalars, product)``: for each operand, by role, what computes its gradient if it is wanted."""


def of_product(g: Tensor, x: Mapping[str, Tensor], scalars: tuple[float, ...], product: Product) -> dict[str, Callable[[], Tensor]]:  # noqa: ARG001
    """For a @ b: grad a = g @ bᵀ, grad b = aᵀ @ g."""
    return {"a": lambda: product(g, x["b"].mT), "b": lambda: product(x["a"].mT, g)}


def of_sum(g: Tensor, x: Mapping[str, Tensor], scalars: tuple[float, ...], product: Product) -> dict[str, Callable[[], Tensor]]:
    """For alpha · a @ b + beta · inp: those of the product times alpha, and beta · g summed over what was broadcast."""
    alpha, beta = scalars
    scaled = g if alpha == 1 else g * alpha
    return {**of_product(scaled, x, scalars, product), "inp": lambda: (g * beta).sum_to_size(x["inp"].shape)}


def of_two_products(
    g: Tensor, x: Mapping[str, Tensor], scalars: tuple[float, ...], product: Product
) -> dict[str, Callable[[], Tensor]]:
    """For a @ b + c @ d: also grad c = g @ dᵀ, grad d = cᵀ @ g."""
    return {**of_product(g, x, scalars, product), "c": lambda: product(g, x["d"].mT), "d": lambda: product(x["c"].mT, g)}
