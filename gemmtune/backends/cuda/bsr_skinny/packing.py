"""A weight as the kernel multiplies it: panels of 16 rows, the longest in front, and their blocks as fragments, by torch."""

from __future__ import annotations

import torch

from ....numerics.block_sparse import parts, rows_of
from ..bsr.configs import FRAGMENT

WORD_BYTES, LINE_WORDS = 4, 32
HEAD_WORDS = 8
"""What is told of a panel before its columns: its first row, its first block, how many it has, and words that are not used, so that
lines end with as many columns as a stage may have blocks."""


def format_of(block: int) -> str:
    """The name of the layout of a prepacked weight."""
    return f"panels of blocks of {block}"


def panels_of(n: int) -> int:
    """The panels of a weight of ``n`` rows, a row of blocks of 16, or half of one of blocks of 32."""
    return n // FRAGMENT


def panel_words(k: int, block: int) -> int:
    """The words that tell of a panel, whole lines of memory: there is room for every column, so that none of them is searched."""
    return -(-(HEAD_WORDS + k // block) // LINE_WORDS) * LINE_WORDS


def fragments_at(n: int, k: int, block: int) -> int:
    """The bytes before the first fragment."""
    return panels_of(n) * panel_words(k, block) * WORD_BYTES


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A sparse_bsr weight [N, K] of blocks of 16 or 32 as uint8.

    First come, as int32, lines of ``panel_words`` for each panel, those with the most blocks in front: ``HEAD_WORDS``, then the
    rising numbers of its block columns, then zeros. The blocks follow, panel after panel: 16 of their rows, as fragments.
    """
    values, crow, col = parts(weight)
    block, (n, k) = values.shape[1], weight.shape
    halves = block // FRAGMENT
    lengths = crow.diff().long().repeat_interleave(halves)
    order = lengths.argsort(descending=True, stable=True)
    lengths = lengths[order]
    firsts = lengths.cumsum(0) - lengths
    half = torch.arange(halves, device=values.device)
    panel = order.argsort()[(rows_of(crow).unsqueeze(1) * halves + half).flatten()]
    columns = col.long().repeat_interleave(halves)
    sequence = (panel * (k // block) + columns).argsort()
    panel, columns = panel[sequence], columns[sequence]
    told = torch.zeros(panels_of(n), panel_words(k, block), dtype=torch.int32, device=values.device)
    told[:, 0], told[:, 1], told[:, 2] = (x.int() for x in (order * FRAGMENT, firsts, lengths))
    told[panel, HEAD_WORDS + torch.arange(len(panel), device=values.device) - firsts[panel]] = columns.int()
    fragments = fragments_of(values)[sequence].contiguous()
    return torch.cat([told.view(torch.uint8).flatten(), fragments.view(torch.uint8).flatten()])


def fragments_of(values: torch.Tensor) -> torch.Tensor:
    """Blocks [count, block, block] as [count · block / 16, block · 16], 16 rows after the other, a fragment for every 16 columns.

    A fragment has eight elements for each lane of a warp, as m16n8k16 has its left operand (PTX ISA 8.0, "Matrix Fragments for
    mma.m16n8k16"), but that the order of K is another one: lane l has, of rows l / 4 and l / 4 + 8, as many neighbours from
    l % 4 · block / 4 on, so that those of x lie together, too.
    """
    count, halves = len(values), values.shape[1] // FRAGMENT
    apart = values.reshape(count, halves, 2, 8, 4, halves, 2, 2)
    return apart.permute(0, 1, 5, 3, 4, 6, 2, 7).reshape(count * halves, halves * FRAGMENT * FRAGMENT)
