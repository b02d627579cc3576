"""Where a result is wrong, in words: which batches, rows and columns."""

from __future__ import annotations

import itertools

import torch

__all__ = ["place"]

DENSE = 0.25
"""The least share of wrong elements among those in the wrong rows and columns for these to be a place. With small integers, or
where a bug changes little, some come out right by chance."""
LARGEST_TILE = 256
SMALLEST_TILE = 8


def place(bad: torch.Tensor) -> str:
    """The part of a [B, M, N] mask that is True, as after "in": ``the last row``, ``batch 2, columns 64–95``.

    Empty if it is everywhere, or scattered.
    """
    batch, m, n = bad.shape
    batches, rows, cols = bad.any(-1).any(-1), bad.any(-1).any(0), bad.any(-2).any(0)
    wrong = int(bad.sum())
    within = int(batches.sum()) * int(rows.sum()) * int(cols.sum())
    if not wrong or wrong < DENSE * within:
        return ""
    parts = [
        _lines(batches, "batch", "batches", tail=False) if batch > 1 else "",
        _lines(rows, "row", "rows") if m > 1 else "",
        _lines(cols, "column", "columns") if n > 1 else "",
    ]
    return ", ".join(part for part in parts if part)


def _lines(mask: torch.Tensor, one: str, many: str, *, tail: bool = True) -> str:
    """Some lines of a dimension in words; empty if all, or if they are scattered."""
    size, found = len(mask), mask.nonzero().flatten().tolist()
    first, last, count = found[0], found[-1], len(found)
    if count == size:
        return ""
    if count == last - first + 1:
        if last == size - 1 and first > 0:
            past = _past_tile(first, size) if tail else ""
            if count == 1:
                return f"the last {one}{past}"
            return f"every {one} but the first" if first == 1 else f"the last {count} of {size} {many}{past}"
        if first == 0:
            return f"the first {one}" if count == 1 else f"the first {count} of {size} {many}"
        return f"{one} {first}" if count == 1 else f"{many} {first}–{last}"
    steps = {after - before for before, after in itertools.pairwise(found)}
    if len(steps) == 1 and count > 2:
        step = steps.pop()
        if first - step < 0 and last + step >= size:
            return f"every {_ordinal(step)} {one} from {first}"
    period = _repeated_tile(mask)
    return period.format(many)


def _past_tile(first: int, size: int) -> str:
    """Says so where the lines from ``first`` on are what is left past the last multiple of a tile."""
    tile = LARGEST_TILE
    while tile >= SMALLEST_TILE:
        if size % tile and first == size // tile * tile:
            return f", past a multiple of {tile}"
        tile //= 2
    return ""


def _repeated_tile(mask: torch.Tensor) -> str:
    """The same part of each tile: the largest power of two by which the mask repeats, and which part."""
    size, tile = len(mask), SMALLEST_TILE
    while tile <= min(LARGEST_TILE, size // 2):
        if bool((mask[tile:] == mask[:-tile]).all()):
            found = mask[:tile].nonzero().flatten().tolist()
            if found[-1] - found[0] + 1 == len(found):
                return f"{{}} {found[0]}–{found[-1]} of every {tile}"
            return ""
        tile *= 2
    return ""


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
