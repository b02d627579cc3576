"""A weight as the kernel multiplies it: units in the order of their steps, behind what says where they belong, by torch."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ....numerics.block_sparse import parts, rows_of
from ...panels import panels_of
from .configs import UNIT

ALIGNED_BYTES = 128
"""Units begin at its multiples."""
PLACE_BITS = 8
"""The bits of a step's first word that say which warp groups have a unit; the others are the step's number along K."""


def format_of(warp_groups: int) -> str:
    """The name of the layout of a prepacked weight for tiles of so many warp groups."""
    return f"units of {UNIT}x{UNIT}, rows of {warp_groups}"


def packed_units(weight: torch.Tensor, warp_groups: int) -> torch.Tensor:
    """A sparse_bsr weight [N, K] as uint8.

    Its rows of units are taken ``warp_groups`` at a time. Such a group has a step for each 64 along K where one of its rows has a
    unit. First come the numbers of the groups, int32, those with the most steps in front; then for each, in this order, its first
    step, and the number of all steps; then for each step two int32: its number along K and which rows have a unit, and the number
    of its first unit. From the next multiple of 128 bytes on there are the units, 64 lines of 128 bytes whose chunks of 16 bytes
    are exchanged as a swizzle of 128 bytes does.
    """
    panels = panels_of(weight, UNIT, UNIT)
    values, crow, col = parts(panels)
    groups, columns = -(-(len(crow) - 1) // warp_groups), max(panels.shape[1] // UNIT, 1)
    row = rows_of(crow)
    places, step = (row // warp_groups * columns + col.long()).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    counts = torch.bincount(places // columns, minlength=groups)
    order = counts.argsort(descending=True, stable=True)
    by_group = (order.argsort()[places // columns] * columns + places % columns).argsort()
    step = by_group.argsort()[step]
    place = row % warp_groups
    of_step = torch.bincount(step, minlength=len(places))
    which = torch.zeros_like(of_step).index_add_(0, step, torch.ones_like(place) << place)
    first = of_step.cumsum(0) - of_step
    told = torch.stack([places[by_group] % columns << PLACE_BITS | which, first], dim=1)
    starts = pad(counts[order].cumsum(0), (1, 0))
    head = pad(torch.cat([order, starts]), (0, 1))
    words = torch.cat([head, told.flatten()]).to(torch.int32)
    words = pad(words, (0, -len(words) % (ALIGNED_BYTES // 4)))
    units = swizzled(values[(step * warp_groups + place).argsort()])
    return torch.cat([words.view(torch.uint8), units.view(torch.uint8).flatten()])


def swizzled(units: torch.Tensor) -> torch.Tensor:
    """Units [count, 64, 64] of 16 bits, chunk c of line i in the place of chunk c xor i % 8."""
    line, place = torch.arange(UNIT, device=units.device), torch.arange(8, device=units.device)
    held = (place ^ line[:, None] % 8)[:, :, None].expand(len(units), UNIT, 8, 8)
    return units.reshape(len(units), UNIT, 8, 8).gather(2, held).view(len(units), UNIT, UNIT)
