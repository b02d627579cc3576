"""A weight as the kernel multiplies it: for each warp its fragments in the order in which it comes to them, by torch."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ....numerics.block_sparse import parts, rows_of
from ..boxes import LINE
from .configs import FRAGMENT, UNIT, units_of

WORD_BITS, ALIGNED_BYTES = 32, 128
SPARE = 16
"""Fragments of zeros behind the last one, which are read ahead and multiplied with nothing."""


def format_of(block: int) -> str:
    """The name of the layout of a prepacked weight."""
    return f"fragments of blocks of {block}"


def bits_of(block: int) -> int:
    """The bits that say which blocks a unit has within LINE of K: a nibble for each row of blocks of 16, or two bits."""
    return UNIT // block * (LINE // block)


def words_of(k: int, block: int) -> int:
    """The words of 32 such bits of a unit."""
    return -(-k // (LINE * (WORD_BITS // bits_of(block))))


def fragments_at(n: int, k: int, block: int) -> int:
    """The bytes before the first fragment."""
    return -(-4 * units_of(n) * (UNIT // block + 1 + words_of(k, block)) // ALIGNED_BYTES) * ALIGNED_BYTES


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A sparse_bsr weight [N, K] of blocks of 16 or 32 as uint8.

    First come, as int32, the numbers of the rows of blocks that each unit has, the units with the most blocks in front; of blocks
    of 16 a long row and a short one. Then the number of the first fragment of each unit, and a line of words with its bits, LINE
    after LINE along K: those of its first row of blocks below those of the second. From the next multiple of 128 bytes on there
    are the fragments, LINE after LINE of a unit, its first row of blocks before the second; of a block of 32 four of them, upper
    and lower rows of the first 16 columns, then those of the others.
    """
    values, crow, col = parts(weight)
    block, (n, k) = values.shape[1], weight.shape
    rows, columns = order_of(crow.diff().long(), UNIT // block), LINE // block
    unit = rows.argsort()[rows_of(crow)]
    unit, row = unit // (UNIT // block), unit % (UNIT // block)
    line, bit = col.long() // columns, row * columns + col.long() % columns
    steps = words_of(k, block) * (WORD_BITS // bits_of(block))
    place = (unit * steps + line) * bits_of(block) + bit
    held = torch.zeros(units_of(n) * steps * bits_of(block), dtype=torch.bool, device=values.device)
    held[place] = True
    counts = torch.bincount(unit, minlength=units_of(n)) * (block // FRAGMENT) ** 2
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=held.device)
    words = (held.view(-1, WORD_BITS).int() << bits).sum(1, dtype=torch.int32)
    head = torch.cat([rows.int(), (counts.cumsum(0) - counts).int(), words])
    head = pad(head, (0, fragments_at(n, k, block) // 4 - len(head)))
    fragments = pad(fragments_of(values[place.argsort()]), (0, 0, 0, SPARE))
    return torch.cat([head.view(torch.uint8), fragments.contiguous().view(torch.uint8).flatten()])


def order_of(lengths: torch.Tensor, each: int) -> torch.Tensor:
    """The numbers of rows of ``lengths`` blocks, ``each`` of a unit behind each other, the units with the most blocks in front.

    Of two rows of a unit one is as long as the other is short. Behind the last row comes one that does not exist, if need be.
    """
    lengths = pad(lengths, (0, -len(lengths) % each))
    order = lengths.argsort(descending=True, stable=True)
    units = torch.stack([order, order.flip(0)], dim=1)[: len(order) // 2] if each == 2 else order.view(-1, 1)
    return units[lengths[units].sum(1).argsort(descending=True, stable=True)].flatten()


def fragments_of(values: torch.Tensor) -> torch.Tensor:
    """Blocks as fragments [count, 256]: eight elements for each lane of a warp, as m16n8k16 has its left operand.

    PTX ISA 8.0, "Matrix Fragments for mma.m16n8k16": lane l has the rows l / 4 and l / 4 + 8, in the columns from l % 4 * 2 on and
    eight further.
    """
    count, parted = len(values), values.shape[1] // FRAGMENT
    apart = values.reshape(count, parted, 2, 8, parted, 2, 4, 2)
    return apart.permute(0, 4, 1, 3, 6, 5, 2, 7).reshape(-1, FRAGMENT * FRAGMENT)
