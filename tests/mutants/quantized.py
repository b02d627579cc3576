"""Mutants of quantized operations: scales and zero points of other elements, misread weights, narrow integer sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from .gemm import FACTOR, INT8, MIXED, SCALED, Gemm, Terms, Weights, apply_epilogue, scaled, spread, unpacked
from .products import rounding_blocks
from .reading import read_at

__all__ = [
    "block_of_a_before",
    "column_scale_along_k",
    "factor_along_the_rows",
    "factor_read_as_bfloat16",
    "first_group_for_all",
    "float16_saturated",
    "halves_of_k_in_a_byte",
    "high_bits_read_twice",
    "int4_read_as_unsigned",
    "low_bits_read_twice",
    "nibbles_swapped",
    "pairs_clamped_to_16_bits",
    "remainder_with_the_group_before",
    "row_scales_exchanged",
    "scale_applied_twice",
    "scale_of_the_next_group",
    "scale_read_as_bfloat16",
    "scales_read_as_contiguous",
    "sums_in_float32",
    "uint4_read_as_signed",
    "uint8_read_as_signed",
    "zero_after_the_scale",
    "zero_dropped",
    "zero_of_the_next_column",
]


def _mixed(change: Callable[[Weights], Weights]) -> Gemm:
    return Gemm(gemm_traits=MIXED, unpack=lambda weights: unpacked(change(weights)))


def _scales(change: Callable[[torch.Tensor, Weights], torch.Tensor]) -> Gemm:
    """Return a GEMM that applies the same change to scales and zero points."""

    def changed(weights: Weights) -> Weights:
        scale, zero = ((x if x is None or x.dim() < 2 else change(x, weights)) for x in (weights.scale, weights.zero))
        return dataclasses.replace(weights, scale=scale, zero=zero)

    return _mixed(changed)


def _next(scale: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``scale`` with each element replaced by the next one. The last one stays."""
    count = scale.shape[dim]
    index = torch.arange(1, count + 1, device=scale.device).clamp_max(max(count - 1, 0))
    return scale.index_select(dim, index) if count else scale


scale_of_the_next_group = _scales(lambda scale, _: _next(scale, 0))
first_group_for_all = _scales(lambda scale, _: scale[:1].expand_as(scale).contiguous())


def _remainder(scale: torch.Tensor, weights: Weights) -> torch.Tensor:
    k = weights.size[0]
    group = next((size for size in (32, 64, 128) if -(-k // size) == scale.shape[0]), k)
    if k % max(group, 1) == 0 or scale.shape[0] < 2:
        return scale
    return torch.cat([scale[:-1], scale[-2:-1]])


remainder_with_the_group_before = _scales(_remainder)
"""There are K / group groups, and the last of them serves the remainder of K too."""


def _along_k(weights: Weights) -> torch.Tensor:
    scale, (k, n) = weights.scale, weights.size
    if scale is None or tuple(scale.shape) != (1, n) or n < 2:
        return unpacked(weights)
    plain = unpacked(dataclasses.replace(weights, scale=None))
    return plain * scale[0, torch.arange(k, device=scale.device) % n].unsqueeze(-1)


column_scale_along_k = Gemm(gemm_traits=MIXED, unpack=_along_k)
zero_dropped = _mixed(lambda weights: dataclasses.replace(weights, zero=None))


def _zero_late(weights: Weights) -> torch.Tensor:
    plain = unpacked(dataclasses.replace(weights, zero=None))
    return plain if weights.zero is None else plain - spread(weights.zero.float(), weights.size)


zero_after_the_scale = Gemm(gemm_traits=MIXED, unpack=_zero_late)
"""The weight is b · scale − zero."""
zero_of_the_next_column = _mixed(
    lambda weights: dataclasses.replace(
        weights, zero=weights.zero if weights.zero is None or weights.zero.dim() < 2 else _next(weights.zero, 1)
    )
)
scale_applied_twice = _mixed(
    lambda weights: dataclasses.replace(weights, scale=None if weights.scale is None else weights.scale.float() ** 2)
)
scale_read_as_bfloat16 = _mixed(
    lambda weights: dataclasses.replace(weights, scale=None if weights.scale is None else weights.scale.bfloat16())
)
"""Harmless if the scales are bfloat16 already."""


scales_read_as_contiguous = _scales(lambda scale, _: read_at(scale, (scale.shape[1], 1)))


def _bytes(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Gemm:
    """Return a GEMM that reads other bytes, made of the low and the high four bits, where a byte has two numbers."""
    return _mixed(
        lambda weights: dataclasses.replace(weights, b=change(weights.b & 15, weights.b >> 4)) if weights.encoding else weights
    )


def _halves(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    numbers = torch.cat([low, high])
    return numbers[::2] | numbers[1::2] << 4


nibbles_swapped = _bytes(lambda low, high: high | low << 4)
low_bits_read_twice = _bytes(lambda low, _: low | low << 4)
high_bits_read_twice = _bytes(lambda _, high: high | high << 4)
halves_of_k_in_a_byte = _bytes(_halves)
int4_read_as_unsigned = _mixed(
    lambda weights: dataclasses.replace(weights, encoding="uint4") if weights.encoding == "int4" else weights
)
uint4_read_as_signed = _mixed(
    lambda weights: dataclasses.replace(weights, encoding="int4") if weights.encoding == "uint4" else weights
)
uint8_read_as_signed = _mixed(
    lambda weights: (
        dataclasses.replace(weights, b=weights.b.view(torch.int8))
        if weights.b.dtype == torch.uint8 and not weights.encoding
        else weights
    )
)


def _before(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scaled(a, b, _next(scale_a.flip(1), 1).flip(1), scale_b)


block_of_a_before = Gemm(gemm_traits=SCALED, scale=_before)
"""Blocks of 128 along K use the scale of a that belongs to the previous block."""


def _exchanged(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    first, second = terms.scale_a, terms.scale_b
    if first is not None and second is not None and first.numel() == second.numel() > 1:
        terms = dataclasses.replace(terms, scale_a=second.mT, scale_b=first.mT)
    return apply_epilogue(acc, terms)


row_scales_exchanged = Gemm(gemm_traits=SCALED, epilogue=_exchanged)
"""Scales of rows and columns are exchanged, which fits only if M = N."""


def _factor_along_rows(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    factor = terms.factor
    if factor is not None and factor.dim() == 1 and acc.shape[-1] == acc.shape[-2]:
        terms = dataclasses.replace(terms, factor=factor.unsqueeze(-1))
    return apply_epilogue(acc, terms)


factor_along_the_rows = Gemm(gemm_traits=FACTOR, epilogue=_factor_along_rows)


def _narrow_factor(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    return apply_epilogue(acc, dataclasses.replace(terms, factor=None if terms.factor is None else terms.factor.bfloat16()))


factor_read_as_bfloat16 = Gemm(gemm_traits=FACTOR, epilogue=_narrow_factor)


def _clamped_pairs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product with pairs of products added in 16 bits, which hold all sums except (−128)² · 2."""
    bounds = torch.iinfo(torch.int16)
    acc = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device=a.device)
    for k in range(0, a.shape[-1], 2):
        acc = acc + (a[..., k : k + 2] @ b[..., k : k + 2, :]).clamp(bounds.min, bounds.max)
    return acc


pairs_clamped_to_16_bits = Gemm(gemm_traits=INT8, product=_clamped_pairs)
sums_in_float32 = Gemm(gemm_traits=INT8, product=rounding_blocks(torch.float32))
"""Sums are exact up to 2^24 only."""


def _saturated(acc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(torch.float16).max
    return out.copy_(torch.where(acc.isinf(), acc, acc.clamp(-largest, largest)) if out.dtype == torch.float16 else acc)


float16_saturated = Gemm(gemm_traits=SCALED, store=_saturated)
"""The conversion is meant for 8-bit results."""
