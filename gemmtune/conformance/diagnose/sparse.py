"""Bugs of block-sparse products: blocks left out, repeated, transposed or at other columns."""

from collections.abc import Iterator

import torch

from ...numerics.block_sparse import parts, rows_of
from .evidence import View
from .match import Suspect

MOST_ELEMENTS = 2**22
"""Maximum elements of a weight whose suspects are tried."""
Blocks = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Values of blocks, their block rows and their block columns."""


def blocks(view: View) -> Iterator[Suspect]:
    """Yield suspects that use other blocks than those of the weight, or these at other places."""
    weight = view.evidence.operands.weight
    if weight is None or weight.layout != torch.sparse_bsr or weight.numel() > MOST_ELEMENTS:
        return
    values, crow, col = (x.cpu() for x in parts(weight))
    if not len(values):
        return
    for text, changed in _changed(values.double(), crow.long(), col.long()):
        yield Suspect(text, view.of(b=_dense(changed, weight.shape)[:, view.cols][None]))


def _changed(values: torch.Tensor, crow: torch.Tensor, col: torch.Tensor) -> Iterator[tuple[str, Blocks]]:
    """Yield the blocks that a kernel with a bug uses."""
    row, place = rows_of(crow), torch.arange(len(col))
    first, last = place == crow[row], place == crow[row + 1] - 1
    _, block_n, block_k = values.shape
    yield "blocks transposed", (values.reshape(-1, block_k, block_n).mT, row, col)
    for text, ends in (("first", first), ("last", last)):
        yield f"{text} block of each row dropped", (values[~ends], row[~ends], col[~ends])
        twice = torch.cat([place, place[ends]])
        yield f"{text} block of each row counted twice", (values[twice], row[twice], col[twice])
    yield "column indices ignored: blocks placed from the left on", (values, row, place - crow[row])
    yield "column index of the first block of each row taken for 0", (values, row, torch.where(first, 0, col))
    yield "column index of the last block of each row one too small", (values, row, torch.where(last, (col - 1).clamp_min(0), col))
    for text, by in (("before", 1), ("behind", -1)):
        yield f"column index of the block {text}", (values, row, col.roll(by))
        yield f"blocks one column {text} their own", (values, row, (col - by).clamp(0, int(col.max())))
    ends = crow[1:-1]
    there = ends < len(col)  # the last rows may have no blocks
    more, rows = ends[there], torch.arange(len(ends))[there]
    yield (
        "first block of the next row counted too",
        (torch.cat([values, values[more]]), torch.cat([row, rows]), torch.cat([col, col[more]])),
    )


def _dense(blocks: Blocks, size: torch.Size) -> torch.Tensor:
    """Return the matrix b [K, N] of a weight [N, K] with these blocks. Blocks at one place add up."""
    values, row, col = blocks
    (n, k), (_, block_n, block_k) = size, values.shape
    matrix = torch.zeros((n // block_n, k // block_k, block_n, block_k), dtype=torch.float64)
    matrix.index_put_((row, col), values, accumulate=True)
    return matrix.transpose(1, 2).reshape(n, k).t()
