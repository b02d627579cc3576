"""Row order of a block-sparse weight: rows with the most common columns share a panel, or two panels of one program."""

import math

import torch

from ....numerics.block_sparse import assembled, mask_of, panels_of, parts, rows_of
from .configs import BlocksConfig

Tensor = torch.Tensor
MOST_COMPARED = 2048
"""Most block rows that are compared with each other; more rows form several independent sets."""
MOST_ROUNDS = 24
"""Most rounds of matching; remaining rows are paired in order."""


def packed(weight: Tensor, config: BlocksConfig) -> Tensor:
    """Return a sparse_bsr weight in panels for the kernel with ``config``.

    If rows are reordered, ``crow_indices`` holds the order after the row starts: an entry per ``unit_of`` rows of the panels names
    the rows of the weight. With pairs every two panels have three starts. The first is for blocks in columns that both have,
    alternating between the panels. The others are for columns that only the first or only the second has.
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
    """Return the rows that stay together when blocks of ``block_n`` rows are cut and merged, a power of two."""
    return math.gcd(block_n, config.block_n)


def columns_of(weight: Tensor, unit: int, panel_k: int) -> Tensor:
    """Return a bool matrix: does each group of ``unit`` weight rows have a block in each column of panels?"""
    block_n, block_k = weight.values().shape[1:]
    side = math.gcd(block_k, panel_k)
    held = mask_of(weight).repeat_interleave(block_n // unit, 0).repeat_interleave(block_k // side, 1)
    each = panel_k // side
    return torch.nn.functional.pad(held, (0, -held.shape[1] % each)).unflatten(1, (-1, each)).any(dim=2)  # type: ignore[no-untyped-call,no-any-return]


def most_alike(held: Tensor, joined: int) -> Tensor:
    """Return an order of the rows of ``held``, padded with empty rows, in which each ``joined`` rows share many columns.

    Rows are paired, then the pairs, until each group has ``joined`` rows, a power of two. Rows pair up by choosing each other, or
    as neighbours if that leaves fewer columns. Groups with most columns come first because their programs take longest.
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
    """Return the given rows of each set of ``x``."""
    return x.gather(1, which.unsqueeze(2).expand(-1, -1, x.shape[2]))


def _partners(common: Tensor) -> Tensor:
    """Return pairs [sets, rows / 2, 2] of rows. ``common[set, i, j]`` counts the columns that rows i and j share."""
    each = common.shape[1]
    place = torch.arange(each, device=common.device)
    neighbours = place.view(1, -1, 2).expand(len(common), -1, -1)
    # Ties prefer rows whose indices differ in the lowest bits. Both sides agree on that, and neighbours come first.
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
    """Return the panels of each two rows in order: columns of both, of the first only, of the second only."""
    row = rows_of(crow)
    pair, second = row // 2, row % 2
    _, which, count = (pair * columns + col).unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    part = 3 * pair + torch.where(count[which] == 2, 0, 1 + second)
    order = ((part * columns + col) * 2 + second).argsort()
    sizes = torch.bincount(part, minlength=3 * (len(crow) // 2))
    starts = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    return values[order], starts.to(torch.int32), col[order]
