"""Packed operand q: three bfloat16 planes for each step of K. Built with torch."""

from __future__ import annotations

import torch

from ...by_parts import parts_of
from .configs import BLOCK_K, PLANE_LINES

FORMAT = "float32 by parts in planes of 32"
"""Layout name of a prepacked b."""


def planes(q: torch.Tensor) -> torch.Tensor:
    """Return q [.., cols, K] float32 as [.., steps, 3, cols', 32] bfloat16, with cols zero-padded to a multiple of 8.

    Of each 16 along K, one chunk of eight has the first two elements of every four, the other chunk has the second two. The chunks
    of a line are permuted like a 64-byte swizzle.
    """
    cols, k = q.shape[-2:]
    batch, lines, steps = q.shape[:-2], -(-cols // PLANE_LINES) * PLANE_LINES, 2 * -(-k // (2 * BLOCK_K))
    padded = q.new_zeros((*batch, lines, steps * BLOCK_K))
    padded[..., :cols, :k] = q
    # [.., line, step, 16 along K, four, half of it, element]
    ordered = padded.view(*batch, lines, steps, BLOCK_K // 16, 4, 2, 2).transpose(-2, -3)
    chunks = ordered.reshape(*batch, lines, steps, BLOCK_K // 8, 8)
    line, place = torch.arange(lines, device=q.device), torch.arange(BLOCK_K // 8, device=q.device)
    held = place ^ (line[:, None] // 2 % (BLOCK_K // 8))  # source chunk of each place
    swizzled = chunks.gather(-2, held[:, None, :, None].expand(*batch, lines, steps, BLOCK_K // 8, 8))
    parts = torch.stack(parts_of(swizzled.reshape(*batch, lines, steps, BLOCK_K)), dim=-4).bfloat16()
    return parts.movedim(-2, -4).contiguous()
