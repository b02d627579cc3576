"""Bugs along K: a range that is dropped, counted twice, or added after alpha and the scales.

The contribution of a range of K to an element is a difference of two prefix sums. All ranges are compared at once with a sample of
elements. A range that matches is then tried on the view.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ...problem.dtypes import dtype_info
from .evidence import View
from .match import Suspect

MOST_SAMPLED = 128
"""Maximum elements of a sample. Half of them are wrong."""
MOST_TERMS = 2**22
"""Maximum products of a sample: elements times K."""
PREFILTER = 4
"""Wrong elements that every range is compared with first."""
MOST_SPLITS = 16
SPLITS, SPLIT_BLOCKS = (2, 3, 4, 5, 6, 8, 16), (8, 16, 32, 64, 128)
LARGEST_BLOCK = 128
SMALLEST_TILE = 8


@dataclass(frozen=True, slots=True)
class _Ranges:
    """Ranges [low, high) of K of one sort: last, first, split or block."""

    sort: str
    low: torch.Tensor
    high: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Sample:
    """Sample of S elements.

    ``prefix``: prefix sums of alpha · scale · a · b (S, K + 1). ``factor``: alpha · scale. ``missing``: expected − got. ``margin``:
    tolerance of ``missing``.
    """

    prefix: torch.Tensor
    factor: torch.Tensor
    missing: torch.Tensor
    margin: torch.Tensor
    bad: torch.Tensor


def k_ranges(view: View) -> Iterator[Suspect]:
    """Yield suspects that mistreat the end of K, its beginning, one of several equal parts, or an aligned block."""
    sample = _sample(view)
    if view.problem.k < 2 or not bool(sample.bad.any()):
        return
    k = view.problem.k

    def taking(*parts: tuple[int, int]) -> torch.Tensor:
        """Return the result with only these parts of K."""
        taken = torch.cat([torch.arange(low, high) for low, high in parts])
        return view.of(view.a[..., taken], view.b[:, taken])

    def added_late(low: int, high: int) -> torch.Tensor:
        return taking((0, low), (high, k)) + view.a[..., low:high] @ view.b[:, low:high]

    all_of_it = torch.ones_like(sample.factor)
    faults: tuple[tuple[str, torch.Tensor, Callable[[int, int], torch.Tensor]], ...] = (
        ("dropped", all_of_it, lambda low, high: taking((0, low), (high, k))),
        ("counted twice", -all_of_it, lambda low, high: taking((0, k), (low, high))),
        ("added after alpha and scales were applied", 1 - 1 / torch.where(sample.factor == 0, 1.0, sample.factor), added_late),
    )
    searched = _searched(k)
    tried = sum(len(ranges.low) for ranges in searched)
    for verb, share, result in faults:  # the fault, the missing share of a range's contribution, the result with the fault
        if bool((share == 0).all()):
            continue
        found = [(ranges, fits) for ranges in searched if len(fits := _fitting(sample, ranges, share))]
        sorts = [ranges.sort for ranges, _ in found]
        for ranges, fits in found:
            sizes = (ranges.high - ranges.low)[fits]
            somewhere = "last" in sorts and "first" in sorts
            for pick in dict.fromkeys((fits[sizes.argmin()], fits[sizes.argmax()])):
                low, high = int(ranges.low[pick]), int(ranges.high[pick])
                names = [f"a K block of {high - low}"] if somewhere else []
                for name in (*names, _words(ranges.sort, low, high, sizes, k)):
                    yield Suspect(f"{name} {verb}", result(low, high), tried, along_k=True)


def overlapping(view: View) -> Iterator[Suspect]:
    """Yield suspects whose splits of K are rounded up to whole blocks and thus reach into the next split."""
    k = view.problem.k
    for splits in SPLITS:
        each = -(-k // splits)
        for further in sorted({-each % block for block in SPLIT_BLOCKS} - {0}):
            if further < each:
                terms = torch.cat([torch.arange(i, min(i + each + further, k)) for i in range(0, k, each)])
                text = f"each of {splits} K splits counts {further} terms of the next one too"
                yield Suspect(text, view.of(view.a[..., terms], view.b[:, terms]), len(SPLITS) * len(SPLIT_BLOCKS), along_k=True)


def _sample(view: View) -> _Sample:
    """Return a sample of wrong and right finite elements, in equal parts if possible."""
    usable = view.got.isfinite() & view.expected.isfinite()
    count = max(1, min(MOST_SAMPLED, MOST_TERMS // max(view.problem.k, 1)) // 2)
    places = [(usable & mask).nonzero() for mask in (view.bad, ~view.bad)]
    where = torch.cat([place[:: max(1, -(-len(place) // count))] for place in places])
    i, r, c = where.unbind(1)
    factor = view.alpha * view.scales.expand(view.got.shape[1:])[r, c]
    terms = view.a[i, r] * view.b[i, :, c] * factor[:, None]
    info = dtype_info(view.problem.out.dtype)
    rounding = 2 * (1.01 * info.unit_roundoff * view.got[i, r, c].abs() + info.smallest_subnormal)
    return _Sample(
        prefix=torch.cat([torch.zeros(len(where), 1, dtype=torch.float64), terms.cumsum(1)], dim=1),
        factor=factor,
        missing=(view.expected - view.got)[i, r, c],
        margin=view.tolerance[i, r, c].nan_to_num(0, 0) + rounding + view.allowance[i, r, c],
        bad=view.bad[i, r, c],
    )


def _fitting(sample: _Sample, ranges: _Ranges, share: torch.Tensor) -> torch.Tensor:
    """Return the indices of the ranges that explain the whole sample or, if none does, its wrong elements."""

    def explained(elements: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        rows = elements[:, None]
        parts = (sample.prefix[rows, ranges.high[numbers]] - sample.prefix[rows, ranges.low[numbers]]) * share[rows]
        return (parts - sample.missing[rows]).abs() <= sample.margin[rows]

    wrong = sample.bad.nonzero().flatten()
    fits = torch.arange(len(ranges.low))
    for elements in (wrong[:PREFILTER], wrong):  # a few elements rule out most ranges
        fits = fits[explained(elements, fits).all(0)]
    everywhere = fits[explained((~sample.bad).nonzero().flatten(), fits).all(0)]
    return everywhere if len(everywhere) else fits


def _searched(k: int) -> list[_Ranges]:
    first, last = torch.arange(1, k), torch.arange(0, k)  # "last" includes all of K, the last block of a kernel with one block
    found = [_Ranges("last", last, torch.full_like(last, k)), _Ranges("first", torch.zeros_like(first), first)]
    size = LARGEST_BLOCK
    while size >= 1:
        found.append(_inner("block", size, k))
        size //= 2
    for splits in range(3, MOST_SPLITS + 1):
        found.append(_inner(f"split of {splits}", -(-k // splits), k))
    return [ranges for ranges in found if len(ranges.low)]


def _inner(sort: str, size: int, k: int) -> _Ranges:
    """Return the blocks of ``size`` other than the first and the last one."""
    low = torch.tensor(range(size, k - size, size), dtype=torch.int64)
    return _Ranges(sort, low, low + size)


def _words(sort: str, low: int, high: int, sizes: torch.Tensor, k: int) -> str:
    """Return the name of a range, with the sizes that match as well. Sparse operands may allow several."""
    if sort in ("last", "first"):
        least, most = int(sizes.min()), int(sizes.max())
        if most > 2 * least + 2:
            return f"{sort} K block"
        if least != most:
            return f"{sort} K block ({least} to {most} of {k})"
        return f"{sort} K block of {least}{_remainder(least, k) if sort == 'last' else ''}"
    if sort.startswith("split"):
        return f"K {sort} ({low}–{high - 1})"
    return f"K block {low}–{high - 1}" if high - low > 1 else f"element {low} of K"


def _remainder(size: int, k: int) -> str:
    """Return a note on the largest tile that leaves this remainder of K, or an empty text."""
    tile = LARGEST_BLOCK
    while tile > size and (k % tile != size or k < tile):
        tile //= 2
    return f" (K = {k} is {size} past a multiple of {tile})" if tile > max(size, SMALLEST_TILE - 1) else ""
