"""Products of int8 or float8 inputs and weights, scaled by rows and columns."""

import torch

from ...operators import library as library  # defines torch.ops.gemmtune

Tensor = torch.Tensor
MOST = 127
"""Largest number of int8 that has a negative."""


def rounded_rows(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return rows as int8, and the scale: the given one, or the largest magnitude of each row over 127, as [M, 1]."""
    wide = rows.float()
    if scale is None:
        scale = (wide.abs().amax(1, keepdim=True) / MOST).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scale).round().clamp(-MOST - 1, MOST).to(torch.int8), scale


def int8_product(
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N)
    scale_a: Tensor,  # (M, 1) or one element
    scale_b: Tensor,  # (1, N)
    bias: Tensor | None,  # (N,)
    dtype: torch.dtype,
) -> Tensor:
    """Return (a @ b) · scale_a · scale_b + bias, scaled in float32 and rounded once."""
    result = torch.ops.gemmtune.int_mm(a, b, may_tune=False).float() * scale_a * scale_b
    result = result if bias is None else result + bias.float()
    return result.to(dtype)  # type: ignore[no-any-return]


def float8_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return (a · scale_a) @ (b · scale_b) + bias, for scales of one element or of rows [M, 1] and columns [1, N]."""
    result = torch.ops.gemmtune.scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype, may_tune=False)
    return result if bias is None else result + bias.to(dtype)  # type: ignore[no-any-return]
