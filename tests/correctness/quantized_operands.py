"""Operands of mixed_mm and scaled_mm whose products are exact in float32, and their results."""

from __future__ import annotations

import torch

from gemmtune.problem import Layout, Problem


def every_byte(dtype: torch.dtype) -> torch.Tensor:
    """The 256 bit patterns of a dtype of 8 bits."""
    return torch.arange(256).to(torch.uint8).view(dtype)


def unpacked(b: torch.Tensor, encoding: str) -> torch.Tensor:
    """The numbers [K, N] in float64: row 2i from the low four bits of row i, row 2i + 1 from the high ones."""
    if not encoding:
        return b.double()
    halves = torch.stack((b & 15, b >> 4), dim=1).reshape(2 * b.shape[0], b.shape[1]).int()
    return ((halves ^ 8) - 8 if encoding == "int4" else halves).double()


def over_blocks(scale: torch.Tensor, block: tuple[int, int], size: tuple[int, int]) -> torch.Tensor:
    """A scale for each number of an operand of ``size``, of which each element covers ``block``."""
    if scale.numel() == 1:
        return scale.double().reshape(1, 1).expand(size)
    whole = scale.double().repeat_interleave(min(block[0], size[0]), 0).repeat_interleave(min(block[1], size[1]), 1)
    return whole[: size[0], : size[1]]


def with_layout(layout: Layout, values: torch.Tensor) -> torch.Tensor:
    """``values`` in memory as the layout says; along a stride of 0 the first ones."""
    buffer = torch.zeros(layout.offset + max(layout.span, 1), dtype=layout.dtype)
    made = buffer.as_strided(layout.size, layout.stride, layout.offset)
    first = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in layout.stride)
    made[first].copy_(values[first])
    return made


def integers(size: tuple[int, ...], low: int, high: int, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high + 1, size, generator=rng).to(dtype)


def exact_operands(problem: Problem, seed: int) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """a, b, the scales, and a @ b in float64: small integers, and scales that are powers of two, different ones side by side."""
    rng = torch.Generator().manual_seed(seed)
    a = with_layout(problem.a, integers(problem.a.size, -3, 3, problem.a.dtype, rng))
    low, high = (0, 255) if problem.encoding else (0, 7) if problem.b.dtype == torch.uint8 else (-7, 7)
    b = with_layout(problem.b, integers(problem.b.size, low, high, problem.b.dtype, rng))
    scales = []
    left, right = a.double(), unpacked(b, problem.encoding)
    if problem.scale_a is not None:
        scales.append(powers(problem.scale_a, rng))
        left = left * over_blocks(scales[-1], problem.scale_block("scale_a"), (problem.m, problem.k))
    if problem.scale_b is not None:
        scale = powers(problem.scale_b, rng)
        scales.append(scale)
        if problem.zero_b is not None:
            scales.append(with_layout(problem.zero_b, integers(problem.zero_b.size, -3, 9, problem.zero_b.dtype, rng)))
            right = right - over_blocks(scales[-1], problem.scale_block("zero_b"), problem.b_size)
        right = right * over_blocks(scale, problem.scale_block("scale_b"), problem.b_size)
    return a, b, tuple(scales), left @ right


def powers(layout: Layout, rng: torch.Generator) -> torch.Tensor:
    """Between 1/2 and 4."""
    exponents = torch.randint(-1, 3, layout.size, generator=rng)
    return with_layout(layout, torch.exp2(exponents.float()).to(layout.dtype))
