"""Packed weight of the bsr kernel, its fragments in the order of use, and checks that kernels for small blocks share."""

import dataclasses

import torch
from torch.nn.functional import pad

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.block_sparse import parts, rows_of
from ....problem import Problem
from ..boxes import LINE
from ..family import INT32_LIMIT, float32_sums, why_not_epilogue, why_not_here
from .configs import FRAGMENT, UNIT, units_of

BLOCKS = (16, 32)


def why_not_weight(problem: Problem, device: DeviceInfo) -> str | None:
    """Return the reason why no kernel for small blocks serves the problem's weight on the device, or None."""
    sparsity = problem.sparsity
    if sparsity is None:
        return "b is not block-sparse"
    if (reason := why_not_here(problem, device) or why_not_epilogue(problem)) is not None:
        return reason
    if not problem.prepacked:
        return "b is not prepacked, and packing is done once: pass the result of gemmtune.prepack"
    if sparsity.block_n != sparsity.block_k or sparsity.block_k not in BLOCKS:
        return f"blocks of {sparsity.sides}, expected 16x16 or 32x32"
    if problem.n * problem.k >= INT32_LIMIT * FRAGMENT**2:
        return "more blocks than indices of 32 bits can count"
    return None


def block_of(problem: Problem) -> int:
    return problem.blocks.block_k


def claims_of_blocks(splits: int = 1) -> Claims:
    """Return the claims of a kernel that multiplies only existing blocks, in ``splits`` partial sums."""
    return dataclasses.replace(float32_sums(splits=splits), skips_absent=True)


WORD_BITS, ALIGNED_BYTES = 32, 128
SPARE = 16
"""Zero fragments past the last one. Warps prefetch them and never multiply them."""


def format_of(block: int) -> str:
    return f"fragments of blocks of {block}"


def bits_of(block: int) -> int:
    """Return the bits that mark a unit's blocks within LINE of K: two nibbles for block rows of 16, two bits for one of 32."""
    return UNIT // block * (LINE // block)


def words_of(k: int, block: int) -> int:
    """Return the 32-bit words of such bits in a unit."""
    return -(-k // (LINE * (WORD_BITS // bits_of(block))))


def fragments_at(n: int, k: int, block: int) -> int:
    """Return the byte offset of the first fragment."""
    return -(-4 * units_of(n) * (UNIT // block + 1 + words_of(k, block)) // ALIGNED_BYTES) * ALIGNED_BYTES


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Pack a sparse_bsr weight [N, K] with blocks of 16 or 32 into uint8.

    The head is int32. It lists the block rows of each unit, the units with the most blocks first. With blocks of 16, a unit pairs a
    long block row with a short one. Then come the index of each unit's first fragment, and each unit's words of bits, LINE after
    LINE along K. Bits of its first block row are below those of the second.

    The fragments start at the next multiple of 128 bytes. They are ordered by unit, then LINE, then block row. A block of 32 has
    four: the upper and lower rows of the first 16 columns, then those of the other 16.
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
    """Return block row indices grouped into units of ``each``, the units with the most blocks first.

    ``lengths`` are the blocks of each row. A unit of two pairs a long row with a short one. If their number is odd, the index past
    the last row fills the gap.
    """
    lengths = pad(lengths, (0, -len(lengths) % each))
    order = lengths.argsort(descending=True, stable=True)
    units = torch.stack([order, order.flip(0)], dim=1)[: len(order) // 2] if each == 2 else order.view(-1, 1)
    return units[lengths[units].sum(1).argsort(descending=True, stable=True)].flatten()


def fragments_of(values: torch.Tensor) -> torch.Tensor:
    """Return blocks as fragments [count, 256]: eight elements per lane, in the order of m16n8k16's left operand.

    PTX ISA 8.0, "Matrix Fragments for mma.m16n8k16": lane l has rows l / 4 and l / 4 + 8. It has two columns from l % 4 * 2 on, and
    two columns eight further.
    """
    count, parted = len(values), values.shape[1] // FRAGMENT
    apart = values.reshape(count, parted, 2, 8, parted, 2, 4, 2)
    return apart.permute(0, 4, 1, 3, 6, 5, 2, 7).reshape(-1, FRAGMENT * FRAGMENT)
