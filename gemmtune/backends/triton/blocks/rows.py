"""Which rows of a block-sparse weight lie in one panel, or in two panels of one program: those with most columns in common."""

from __future__ import annotations

import math

import torch

from ....numerics.block_sparse import assembled, mask_of, parts, rows_of
from ...panels import panels_of
from .configs import BlocksConfig

Tensor = torch.Tensor
MOST_COMPARED = 2048
"""Rows of blocks that are compared with each other; further ones are a set of their own."""
MOST_ROUNDS = 24
"""Rounds in which rows find partners; those that are left then are joined as they come."""


def packed(weight: Tensor, config: BlocksConfig) -> Tensor:
    """A sparse_bsr weight in panels as the kernel with ``config`` has them.

    Behind the starts of its rows, ``crow_indices`` has the order of the rows where that is another one: for each ``unit_of`` rows
    of the panels, which ones of the weight these are. With pairs there are three starts for each two panels: of the blocks in
    columns that both have, one of either panel in turn, and of those that only the first and only the second has.
    """
    if config.rows == "neighbours":
        return panels_of(weight, config.block_n, config.block_k)
    unit = unit_of(weight.values().shape[1], config)
    order = most_alike(columns_of(weight, unit, config.block_k), config.whole.block_n // unit)
    panels = panels_of(weight, config.block_n, config.block_k, order)
    values, crow, col = parts(panels)
    if config.panels > 1:
        values, crow, col = _in_pairs(values, crow, col, panels.shape[1] // config.block_k)
    return assembled(torch.cat([crow, order.to(torch.int32)]), col, values, (panels.shape[0], panels.shape[1]))


def unit_of(block_n: int, config: BlocksConfig) -> int:
    """Rows that stay together where blocks of ``block_n`` rows are cut and joined: a power of two."""
    return math.gcd(block_n, config.block_n)


def columns_of(weight: Tensor, unit: int, panel_k: int) -> Tensor:
    """Whether each ``unit`` rows of a weight have a block in each column of panels, as a matrix of bools."""
    block_n, block_k = weight.values().shape[1:]
    side = math.gcd(block_k, panel_k)
    held = mask_of(weight).repeat_interleave(block_n // unit, 0).repeat_interleave(block_k // side, 1)
    each = panel_k // side
    return torch.nn.functional.pad(held, (0, -held.shape[1] % each)).unflatten(1, (-1, each)).any(dim=2)  # type: ignore[no-untyped-call,no-any-return]


def most_alike(held: Tensor, joined: int) -> Tensor:
    """An order of the rows of ``held``, and of empty ones that follow them, in which each ``joined`` have many columns in common.

    Partners are found for rows, then for pairs, until so many are together, a power of two: by choosing each other, or neighbours
    where that leaves fewer columns. The groups with most columns come first, since programs for them take longest.
    """
    rows, columns = held.shape
    sets = -(-rows // MOST_COMPARED)
    each = -(-rows // max(sets * joined, 1)) * joined
    held = torch.nn.functional.pad(held, (0, 0, 0, sets * each - rows)).float().view(sets, each, columns)
    order = torch.arange(sets * each, device=held.device).view(sets, each, 1)
    while order.shape[2] < joined:
        common = held @ held.mT
        first, second = _partners(common).unbind(2)
        order = torch.cat([_taken(order, first), _taken(order, second)], dim=2)
        held = torch.maximum(_taken(held, first), _taken(held, second))
    longest = held.sum(dim=2).flatten().argsort(descending=True, stable=True)
    return order.flatten(0, 1)[longest].flatten()


def _taken(x: Tensor, which: Tensor) -> Tensor:
    """Rows of each set of ``x``."""
    return x.gather(1, which.unsqueeze(2).expand(-1, -1, x.shape[2]))


def _partners(common: Tensor) -> Tensor:
    """Pairs [sets, rows / 2, 2] of an even number of rows, ``common[set, i, j]`` how much i and j have in common."""
    each = common.shape[1]
    place = torch.arange(each, device=common.device)
    neighbours = place.view(1, -1, 2).expand(len(common), -1, -1)
    # Among equals those are preferred whose numbers differ in the lowest bits: both sides do so, and neighbours come first.
    wish = (common - (place ^ place.unsqueeze(1)) / (4 * each)).masked_fill(place == place.unsqueeze(1), -math.inf)
    partner = torch.full_like(place, -1).expand(len(common), -1).clone()
    for _ in range(MOST_ROUNDS):
        best = wish.argmax(dim=2)
        agreed = (best.gather(1, best) == place) & (partner < 0)
        partner = torch.where(agreed, best, partner)
        gone = partner >= 0
        if bool(gone.all()):
            break
        wish = wish.masked_fill(gone.unsqueeze(1) | gone.unsqueeze(2), -math.inf)
    lone = partner < 0
    chosen = torch.where(lone, 2 * each + 2 * place, 2 * torch.minimum(partner, place) + (partner < place))
    found = chosen.argsort(dim=1).unflatten(1, (-1, 2))  # type: ignore[no-untyped-call]

    def shared(pairs: Tensor) -> Tensor:
        return _taken(common, pairs[:, :, 0]).gather(2, pairs[:, :, 1:]).sum(dim=(1, 2))

    return torch.where((shared(found) > shared(neighbours)).view(-1, 1, 1), found, neighbours)


def _in_pairs(values: Tensor, crow: Tensor, col: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The panels of each two rows one after the other: those in columns of both, of the first alone, of the second alone."""
    row = rows_of(crow)
    pair, second = row // 2, row % 2
    _, which, count = (pair * columns + col).unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    part = 3 * pair + torch.where(count[which] == 2, 0, 1 + second)
    order = ((part * columns + col) * 2 + second).argsort()
    sizes = torch.bincount(part, minlength=3 * (len(crow) // 2))
    starts = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    return values[order], starts.to(torch.int32), col[order]
