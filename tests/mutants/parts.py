"""float32 as six products of three bfloat16 parts: a right GEMM, and GEMMs with one fault each."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .gemm import DENSE, Gemm

__all__ = [
    "infinity_times_a_part_of_zero",
    "low_product_dropped",
    "middle_product_dropped",
    "nan_in_a_lower_part",
    "right",
    "rounded_instead_of_cut_off",
]

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
SIX = ((1, 1), (2, 0), (0, 2), (1, 0), (0, 1), (0, 0))
"""Indices of the multiplied parts of a and b, small products first."""


def _cut_off(x: torch.Tensor) -> torch.Tensor:
    """Return the leading eight bits. NaN stays NaN."""
    bits = x.contiguous().view(torch.int32) & -(2**16)
    return torch.where(x.isnan(), x, bits.view(torch.float32))


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _parts(x: torch.Tensor, lead: Callable[[torch.Tensor], torch.Tensor] = _cut_off, *, finite: bool = True) -> Parts:
    """Return the high, middle and low part. With ``finite``, the lower parts of infinities and NaN are 0."""
    high = lead(x)
    rest = torch.where(x.isfinite(), x - high, 0.0) if finite else x - high
    middle = lead(rest)
    return high, middle, rest - middle


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    without: tuple[int, int] | None = None,
    split: Callable[[torch.Tensor], Parts] = _parts,
    zeroed: bool = True,
) -> torch.Tensor:
    parts_a, parts_b = split(a), split(b)
    *small, (i, j) = [pair for pair in SIX if pair != without]
    total = sum(parts_a[p] @ parts_b[q] for p, q in small)
    assert isinstance(total, torch.Tensor)
    return (torch.where(total.isnan(), 0.0, total) if zeroed else total) + parts_a[i] @ parts_b[j]


_TRAITS = DENSE.changed({"dtypes": ("float32",), "input_mode": "parts"})


def _gemm(**changes: object) -> Gemm:
    return Gemm(gemm_traits=_TRAITS, product=functools.partial(_product, **changes))  # type: ignore[arg-type]


right = _gemm()
middle_product_dropped = _gemm(without=(1, 1))
low_product_dropped = _gemm(without=(0, 2))
rounded_instead_of_cut_off = _gemm(split=functools.partial(_parts, lead=_rounded))
"""Rounding makes numbers above the largest bfloat16 infinite."""
nan_in_a_lower_part = _gemm(split=functools.partial(_parts, finite=False), zeroed=False)
infinity_times_a_part_of_zero = _gemm(zeroed=False)
