"""Panels: a block-sparse weight regrouped into blocks of another size, by torch operations on its device."""

from __future__ import annotations

import math

import torch

from ..numerics.block_sparse import assembled, parts, rows_of


def panels_of(weight: torch.Tensor, panel_n: int, panel_k: int, order: torch.Tensor | None = None) -> torch.Tensor:
    """Return the numbers of ``weight`` as a sparse_bsr tensor with blocks of ``panel_n`` × ``panel_k`` and 32-bit indices.

    A panel exists if it overlaps a block. Zeros make all panels whole. ``order`` permutes units of gcd(block_n, ``panel_n``) rows,
    empty ones included.
    """
    values, crow, col = parts(weight)
    count, block_n, block_k = values.shape
    n, k = (-(-size // side) * side for size, side in zip(weight.shape, (panel_n, panel_k), strict=True))
    if order is None and (block_n, block_k) == (panel_n, panel_k):
        return assembled(crow.to(torch.int32), col.to(torch.int32), values.contiguous(), (n, k))
    unit_n, unit_k = math.gcd(block_n, panel_n), math.gcd(block_k, panel_k)
    per_block, per_panel = (block_n // unit_n, block_k // unit_k), (panel_n // unit_n, panel_k // unit_k)
    device = values.device
    inner_n, inner_k = (torch.arange(size, device=device) for size in per_block)
    unit_row = (rows_of(crow).view(-1, 1, 1) * per_block[0] + inner_n.view(1, -1, 1)).expand(count, *per_block).reshape(-1)
    unit_col = (col.long().view(-1, 1, 1) * per_block[1] + inner_k.view(1, 1, -1)).expand(count, *per_block).reshape(-1)
    if order is not None:
        n = len(order) * unit_n
        unit_row = order.argsort()[unit_row]
    units = values.reshape(count, per_block[0], unit_n, per_block[1], unit_k).transpose(2, 3).reshape(-1, unit_n, unit_k)
    columns = k // panel_k
    places, which = (unit_row // per_panel[0] * columns + unit_col // per_panel[1]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    filled = units.new_zeros((len(places), *per_panel, unit_n, unit_k))
    filled[which, unit_row % per_panel[0], unit_col % per_panel[1]] = units
    joined = filled.transpose(2, 3).reshape(len(places), panel_n, panel_k)
    counts = torch.bincount(places // max(columns, 1), minlength=n // panel_n)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return assembled(starts.to(torch.int32), (places % max(columns, 1)).to(torch.int32), joined, (n, k))
