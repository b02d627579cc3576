"""Mutants of mm_plus_mm that drop the second product or a part of it, and right ways to add two products."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from .gemm import DENSE, Gemm
from .reading import read_at

__all__ = [
    "d_read_with_the_strides_of_b",
    "first_k_for_both",
    "one_accumulator",
    "second_product_left_out",
    "second_product_rounded",
]

_SUMS = replace(DENSE, ops=("mm_plus_mm",))


def _first_k(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k = a.shape[1]
    return torch.cat([a, c[:, :k]], 1), torch.cat([b, d[:k]])


def _rounded(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum as torch's composition computes it: c @ d is rounded before a @ b is added."""
    total = a.float() @ b.float() + (c.float() @ d.float()).to(a.dtype).float()
    return total.to(a.dtype) if out is None else out.copy_(total)


def _strides_of_b(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([a, c], 1), torch.cat([b, read_at(d, b.stride()) if d.shape == b.shape else d])


d_read_with_the_strides_of_b = Gemm(gemm_traits=_SUMS, join=_strides_of_b)
"""One set of strides serves both products if their sizes are equal."""
second_product_left_out = Gemm(gemm_traits=_SUMS, join=lambda a, b, c, d: (a, b))
first_k_for_both = Gemm(gemm_traits=_SUMS, join=_first_k)
"""A longer second product is cut to the K of the first one."""
one_accumulator = Gemm(gemm_traits=_SUMS)
second_product_rounded = SimpleNamespace(mm_plus_mm=_rounded, gemm_traits=replace(_SUMS, dtypes=("float16", "bfloat16")))
