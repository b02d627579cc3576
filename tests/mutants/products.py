"""Matrix products in plain torch, with many orders of summation and precisions: building blocks of right and wrong GEMMs.

Each takes a (.., M, K) and b (.., K, N) in the dtype of the accumulator. It returns the running sum (.., M, N) in that dtype or
a wider one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = [
    "Product",
    "backwards",
    "blocks",
    "blockwise",
    "column_by_column",
    "compensated",
    "in_float64",
    "narrowed",
    "one_by_one",
    "pairwise",
    "rounding_blocks",
    "shuffled",
    "split_k",
    "tensor_core",
    "tf32",
    "to_tf32",
]

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of (a, b) in the accumulator's dtype that returns the accumulator."""


def blocks(a: torch.Tensor, b: torch.Tensor, size: int = 16) -> list[torch.Tensor]:
    """Return the products of blocks of ``size`` along K. An empty K gives one block of zeros."""
    return [a[..., k : k + size] @ b[..., k : k + size, :] for k in range(0, max(a.shape[-1], 1), size)]


def one_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product, rounded after each of K additions."""
    acc = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device=a.device)
    for k in range(a.shape[-1]):
        acc = acc + a[..., :, k : k + 1] * b[..., k : k + 1, :]
    return acc


def backwards(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product with terms added from last to first."""
    return one_by_one(a.flip(-1), b.flip(-2))


def shuffled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product with terms added in a random order."""
    order = torch.randperm(a.shape[-1], generator=torch.Generator().manual_seed(5)).to(a.device)
    return one_by_one(a[..., order], b[..., order, :])


def pairwise(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product summed as a binary tree."""
    k = a.shape[-1]
    return (
        one_by_one(a, b)
        if k < 3
        else pairwise(a[..., : k // 2], b[..., : k // 2, :]) + pairwise(a[..., k // 2 :], b[..., k // 2 :, :])
    )


def blockwise(size: int) -> Product:
    """Return a product that adds blocks of ``size`` to the sum, as a matrix instruction of that width does."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first, *others = blocks(a, b, size)
        for block in others:
            first = first + block
        return first

    return product


def compensated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return Kahan's sum: the rounding error of each addition goes into the next one, unless the sum is not finite."""
    acc = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device=a.device)
    lost = torch.zeros_like(acc)
    for k in range(a.shape[-1]):
        term = a[..., :, k : k + 1] * b[..., k : k + 1, :] - lost
        total = acc + term
        lost = torch.where(total.isfinite(), (total - acc) - term, 0.0)
        acc = total
    return acc


def column_by_column(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product as a matrix-vector product for each column of b."""
    columns = [(a @ b[..., j : j + 1]) for j in range(b.shape[-1])]
    return torch.cat(columns, dim=-1) if columns else a @ b


def in_float64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product in float64, without rounding."""
    return a.double() @ b.double()


def rounding_blocks(dtype: torch.dtype, size: int = 16) -> Product:
    """Return a product with an accumulator of ``dtype``, rounded after each block of ``size`` elements of K."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        acc = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=dtype, device=a.device)
        for block in blocks(a, b, size):
            acc = (acc.to(a.dtype) + block).to(dtype)
        return acc.to(a.dtype)

    return product


def split_k(dtype: torch.dtype | None = None, splits: int = 2) -> Product:
    """Return a split-K product with partial sums of ``dtype``, by default the accumulator's."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = blocks(a, b, max(1, -(-a.shape[-1] // splits)))
        return torch.stack([part.to(dtype or a.dtype).to(a.dtype) for part in parts]).sum(dim=0)

    return product


def tensor_core(bits: int, *, promoted_every: int | None = None, width: int = 32) -> Product:
    """Return a product computed like the matrix unit of an NVIDIA GPU.

    It truncates ``width`` products and the running sum to ``bits`` significand bits of the largest one, and adds them exactly.
    Every ``promoted_every`` elements of K the sum is added to a float32 accumulator.
    """

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=torch.float32, device=a.device)
        acc = torch.zeros_like(total, dtype=torch.float64)
        for k in range(0, a.shape[-1], width):
            terms = a[..., k : k + width].double().unsqueeze(-1) * b[..., k : k + width, :].double().unsqueeze(-3)
            terms = torch.cat([acc.unsqueeze(-2), terms], dim=-2)
            largest = torch.frexp(terms.nan_to_num(0, 0, 0).abs().amax(dim=-2, keepdim=True)).exponent
            unit = torch.exp2((largest - bits).double())
            acc = torch.where(terms.isfinite(), (terms / unit).trunc() * unit, terms).sum(dim=-2)
            if promoted_every is not None and (k + width) % promoted_every == 0:
                total, acc = total + acc.float(), torch.zeros_like(acc)
        return total + acc.float()

    return product


def narrowed(which: str, dtype: torch.dtype) -> Product:
    """Return a product that reads an input (``a``, ``b`` or ``ab``) as ``dtype``."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.to(dtype).to(a.dtype) if "a" in which else a) @ (b.to(dtype).to(b.dtype) if "b" in which else b)

    return product


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers truncated to tf32's 11 significand bits."""
    return (x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32)


def tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of inputs truncated to tf32."""
    return to_tf32(a) @ to_tf32(b)
