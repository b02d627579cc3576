"""Packed weight of the bsr_skinny kernel: panels of 16 rows, the longest first, with blocks as fragments. Built with torch."""

import torch

from ....numerics.block_sparse import parts, rows_of
from ..bsr.configs import FRAGMENT

WORD_BYTES, LINE_WORDS = 4, 32
HEAD_WORDS = 8
"""Words of a panel's head: first row, first block, number of blocks, and padding to the columns of a stage."""


def format_of(block: int) -> str:
    return f"panels of blocks of {block}"


def panels_of(n: int) -> int:
    """Return the panels of a weight with ``n`` rows: a row of blocks of 16, or half a row of blocks of 32."""
    return n // FRAGMENT


def panel_words(k: int, block: int) -> int:
    """Return the words that describe a panel, in whole memory lines with room for every column."""
    return -(-(HEAD_WORDS + k // block) // LINE_WORDS) * LINE_WORDS


def fragments_at(n: int, k: int, block: int) -> int:
    """Return the byte offset of the first fragment."""
    return panels_of(n) * panel_words(k, block) * WORD_BYTES


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Pack a sparse_bsr weight [N, K] with blocks of 16 or 32 into uint8.

    The head is int32: ``panel_words`` for each panel, the panels with the most blocks first. They are ``HEAD_WORDS``, the rising
    indices of its block columns, and zeros. The blocks follow, panel by panel: the panel's 16 rows of each block, as fragments.
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
    heads = torch.zeros(panels_of(n), panel_words(k, block), dtype=torch.int32, device=values.device)
    heads[:, 0], heads[:, 1], heads[:, 2] = (x.int() for x in (order * FRAGMENT, firsts, lengths))
    heads[panel, HEAD_WORDS + torch.arange(len(panel), device=values.device) - firsts[panel]] = columns.int()
    fragments = fragments_of(values)[sequence].contiguous()
    return torch.cat([heads.view(torch.uint8).flatten(), fragments.view(torch.uint8).flatten()])


def fragments_of(values: torch.Tensor) -> torch.Tensor:
    """Return blocks [count, block, block] as [count · block / 16, block · 16]: 16 rows at a time, with a fragment per 16 columns.

    A fragment has eight elements per lane, like m16n8k16's left operand (PTX ISA 8.0, "Matrix Fragments for mma.m16n8k16"), but in
    a different order of K. Lane l has contiguous elements of rows l / 4 and l / 4 + 8, from l % 4 · block / 4 on. So the matching
    elements of x are contiguous too.
    """
    count, halves = len(values), values.shape[1] // FRAGMENT
    apart = values.reshape(count, halves, 2, 8, 4, halves, 2, 2)
    return apart.permute(0, 1, 5, 3, 4, 6, 2, 7).reshape(count * halves, halves * FRAGMENT * FRAGMENT)
