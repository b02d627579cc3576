"""q as the kernel multiplies it: three planes of bfloat16 for each step of K, by torch."""

from __future__ import annotations

import torch

from ...by_parts import parts_of
from .configs import BLOCK_K, PLANE_LINES

FORMAT = "float32 by parts in planes of 32"
"""The name of the layout of a prepacked b."""


def planes(q: torch.Tensor) -> torch.Tensor:
    """q [.., cols, K] float32 as [.., steps, 3, cols', 32] of bfloat16, cols padded with zeros to a multiple of 8.

    A chunk of eight elements of 16 along K has the first or the second two of each four, and chunks of a line are exchanged as a
    swizzle of 64 bytes does.
    """
    cols, k = q.shape[-2:]
    batch, lines, steps = q.shape[:-2], -(-cols // PLANE_LINES) * PLANE_LINES, 2 * -(-k // (2 * BLOCK_K))
    padded = q.new_zeros((*batch, lines, steps * BLOCK_K))
    padded[..., :cols, :k] = q
    # [.., line, step, 16 along K, four, half of it, element]
    ordered = padded.view(*batch, lines, steps, BLOCK_K // 16, 4, 2, 2).transpose(-2, -3)
    chunks = ordered.reshape(*batch, lines, steps, BLOCK_K // 8, 8)
    line, place = torch.arange(lines, device=q.device), torch.arange(BLOCK_K // 8, device=q.device)
    held = place ^ (line[:, None] // 2 % (BLOCK_K // 8))  # by the place of each chunk, the one that is there
    swizzled = chunks.gather(-2, held[:, None, :, None].expand(*batch, lines, steps, BLOCK_K // 8, 8))
    parts = torch.stack(parts_of(swizzled.reshape(*batch, lines, steps, BLOCK_K)), dim=-4).bfloat16()
    return parts.movedim(-2, -4).contiguous()
