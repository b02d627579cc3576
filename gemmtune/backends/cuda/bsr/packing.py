"""A weight as the kernel multiplies it: units in the order of their steps, behind what says where they belong, by torch."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ....numerics.block_sparse import parts, rows_of
from ...panels import panels_of
from .configs import UNIT

ALIGNED_BYTES = 128
"""Units begin at its multiples."""
MOST_COMPARED = 1024
"""Rows of units of which those are found that have the most in common."""
PLACE_BITS = 8
"""The bits of a step's first word that say which warp groups have a unit; the others are the step's number along K."""


def format_of(warp_groups: int) -> str:
    """The name of the layout of a prepacked weight for tiles of so many warp groups."""
    return f"units of {UNIT}x{UNIT}, rows of {warp_groups}"


def columns_of(k: int) -> int:
    """The steps that a group has room for."""
    return max(-(-k // UNIT), 1)


def units_at(groups: int, warp_groups: int, columns: int) -> int:
    """The bytes before the first unit."""
    head = groups * (warp_groups + 1)
    return -(-(4 * (head + head % 2) + 8 * groups * columns) // ALIGNED_BYTES) * ALIGNED_BYTES


def packed_units(weight: torch.Tensor, warp_groups: int) -> torch.Tensor:
    """A sparse_bsr weight [N, K] as uint8.

    Its rows of units are grouped, ``warp_groups`` of them that have many columns in common. A group has a step for each 64 along K
    where one of its rows has a unit. First come the numbers of the rows of each group, int32, the groups with the most steps in
    front; then the number of steps of each, and room up to a multiple of 8 bytes. Then each group has a line with room for as many
    steps as there are columns: two int32, the step's number along K and which rows have a unit, and the number of its first unit.
    Zeros fill a line; where it begins is known without reading anything. From the next multiple of 128 bytes on there are the
    units in the order of the steps, 64 lines of 128 bytes whose chunks of 16 bytes are exchanged as a swizzle of 128 bytes does.
    """
    panels = panels_of(weight, UNIT, UNIT)
    values, crow, col = parts(panels)
    row, columns = rows_of(crow), columns_of(panels.shape[1])
    rows = grouped_rows(row.cpu(), col.long().cpu(), len(crow) - 1, columns, warp_groups).to(row.device)
    place, groups = rows.argsort()[row], len(rows) // warp_groups
    places, step = (place // warp_groups * columns + col.long()).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    counts = torch.bincount(places // columns, minlength=groups)
    order = counts.argsort(descending=True, stable=True)
    group = order.argsort()[places // columns]
    by_group = (group * columns + places % columns).argsort()
    step, group, counts = by_group.argsort()[step], group[by_group], counts[order]
    place = place % warp_groups
    of_step = torch.bincount(step, minlength=len(places))
    which = torch.zeros_like(of_step).index_add_(0, step, torch.ones_like(place) << place)
    first = of_step.cumsum(0) - of_step
    lines = first.new_zeros(groups, columns, 2)
    in_line = torch.arange(len(group), device=group.device) - (counts.cumsum(0) - counts)[group]
    lines[group, in_line] = torch.stack([places[by_group] % columns << PLACE_BITS | which, first], dim=1)
    head = torch.cat([rows.view(groups, warp_groups)[order].flatten(), counts])
    words = torch.cat([pad(head, (0, len(head) % 2)), lines.flatten()]).to(torch.int32)
    words = pad(words, (0, -len(words) % (ALIGNED_BYTES // 4)))
    units = swizzled(values[(step * warp_groups + place).argsort()])
    return torch.cat([words.view(torch.uint8), units.view(torch.uint8).flatten()])


def grouped_rows(row: torch.Tensor, col: torch.Tensor, rows: int, columns: int, each: int) -> torch.Tensor:
    """The numbers of all rows, ``each`` of a group behind each other, where units are at (``row``, ``col``).

    Rows that have many columns in common come together, so that x is copied once for all of them: pairs of rows, then pairs of
    pairs, among as many rows as are compared at a time. Behind the last ones come rows that do not exist.
    """
    existing = torch.zeros(-(-rows // each) * each, columns)
    existing[row, col] = 1
    compared = range(0, len(existing), MOST_COMPARED)
    return torch.cat([first + _grouped(existing[first : first + MOST_COMPARED], each) for first in compared])


def _grouped(existing: torch.Tensor, each: int) -> torch.Tensor:
    """The numbers of these rows, ``each`` of a group behind each other; ``existing`` is one where a row has a unit."""
    order = torch.arange(len(existing))[:, None]
    while order.shape[1] < each:
        pairs = torch.tensor(_pairs(existing))
        existing, order = existing[pairs].amax(1), order[pairs].flatten(1)
    return order.flatten()


def _pairs(existing: torch.Tensor) -> list[tuple[int, int]]:
    """Each row, the longest first, with the one that has the most columns in common with it; of several, with the nearest."""
    numbers = torch.arange(len(existing))
    likes = existing @ existing.t() - (numbers[:, None] - numbers).abs() / len(numbers)
    left, pairs = set(numbers.tolist()), []
    for one in existing.sum(1).argsort(descending=True, stable=True).tolist():
        if one in left:
            likes[:, one] = -torch.inf
            other = int(likes[one].argmax())
            likes[:, other] = -torch.inf
            left -= {one, other}
            pairs.append((one, other))
    return pairs


def swizzled(units: torch.Tensor) -> torch.Tensor:
    """Units [count, 64, 64] of 16 bits, chunk c of line i in the place of chunk c xor i % 8."""
    line, place = torch.arange(UNIT, device=units.device), torch.arange(8, device=units.device)
    held = (place ^ line[:, None] % 8)[:, :, None].expand(len(units), UNIT, 8, 8)
    return units.reshape(len(units), UNIT, 8, 8).gather(2, held).view(len(units), UNIT, UNIT)
