"""Grouped products that go wrong in known ways: ``function(out, a, b, offs)`` for groups of rows, and for groups of terms."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
TILE = 4


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one product does otherwise."""

    begin: Callable[[int, int, int], int] = lambda g, begin, end: begin
    """The first row (or term) that group g takes, …"""
    end: Callable[[int, int, int], int] = lambda g, begin, end: end
    """… and where it ends."""
    matrix: Callable[[int, int, int, int], int] = lambda g, groups, begin, end: g
    """Whose matrix is multiplied, or whose result is written."""
    groups: int = 0
    """Groups left out at the end."""
    writes_empty: bool = False
    """A group without rows writes zeros into the row where it would be."""
    keeps_empty: bool = False
    """A group without terms leaves its result unwritten."""
    leaks: bool = False
    """What lies behind a group is multiplied by zero and added."""
    behind: bool = False
    """Rows and terms behind the last group belong to it."""
    narrow: bool = False
    """Partial sums of 16 bits."""
    sizes: bool = False
    """Offsets are read as how many each group has."""


def pieces(offs: Tensor, fault: Fault, total: int) -> list[tuple[int, int, int]]:
    """(group, begin, end) as the fault sees them."""
    ends = offs.tolist()
    if fault.behind:
        ends[-1] = total
    if fault.sizes:
        ends = list(itertools.accumulate(ends))
    starts = [0, *ends[:-1]]
    found = [(g, fault.begin(g, s, e), fault.end(g, s, e)) for g, (s, e) in enumerate(zip(starts, ends, strict=True))]
    return [(g, max(s, 0), min(e, total)) for g, s, e in found[: len(found) - fault.groups]]


def multiplied(a: Tensor, b: Tensor, fault: Fault) -> Tensor:
    """a @ b with the sums that the fault says."""
    if not fault.narrow:
        return a @ b
    half = a.shape[1] // 2
    return (a[:, :half] @ b[:half]).bfloat16().float() + a[:, half:] @ b[half:]


def of_rows(out: Tensor, a: Tensor, b: Tensor, offs: Tensor, *, fault: Fault) -> None:
    """out = a @ b[g] for each group of rows, with a fault."""
    groups, given = b.shape[0], pieces(offs, fault, a.shape[0])
    for g, begin, end in given:
        if begin >= end:
            continue
        value = multiplied(a[begin:end], b[fault.matrix(g, groups, begin, end) % groups], fault)
        if fault.leaks:
            value = value + 0 * b[(g + 1) % groups].sum(dim=0)
        out[begin:end] = value
    for _, begin, end in given:
        if fault.writes_empty and begin >= end and begin < a.shape[0]:
            out[begin] = 0


def of_terms(out: Tensor, a: Tensor, b: Tensor, offs: Tensor, *, fault: Fault) -> None:
    """out[g] = a[:, g] @ b[g] over each group of terms, with a fault."""
    groups, total = out.shape[0], b.shape[0]
    for g, begin, end in pieces(offs, fault, total):
        if begin >= end and fault.keeps_empty:
            continue
        value = multiplied(a[:, begin:end], b[begin:end], fault)
        if fault.leaks and end < total:
            value = value + 0 * (a[:, end : end + 1] @ b[end : end + 1])
        out[fault.matrix(g, groups, begin, end) % groups] = value


ROWS: dict[str, Fault] = {
    "right": Fault(),
    "matrix of the group before at a boundary": Fault(matrix=lambda g, groups, begin, end: g - (begin % TILE != 0)),
    "matrix of the neighbour": Fault(matrix=lambda g, groups, begin, end: g + 1),
    "matrix of the last group for all": Fault(matrix=lambda g, groups, begin, end: groups - 1),
    "last row of a group lost": Fault(end=lambda g, begin, end: end - 1),
    "first row of a group lost": Fault(begin=lambda g, begin, end: begin + 1),
    "offsets off by one": Fault(begin=lambda g, begin, end: begin - 1, end=lambda g, begin, end: end - 1),
    "groups begin at tiles": Fault(begin=lambda g, begin, end: begin // TILE * TILE),
    "groups end at tiles": Fault(end=lambda g, begin, end: begin + (end - begin) // TILE * TILE),
    "one tile for each group": Fault(end=lambda g, begin, end: min(end, begin + TILE)),
    "last group left out": Fault(groups=1),
    "empty group writes": Fault(writes_empty=True),
    "next group's matrix times zero": Fault(leaks=True),
    "partial sums of 16 bits": Fault(narrow=True),
    "offsets read as sizes": Fault(sizes=True),
    "matrix of the group before for the first": Fault(matrix=lambda g, groups, begin, end: g - (begin == 0 and g > 0)),
}
TERMS: dict[str, Fault] = {
    "right": Fault(),
    "last term of a group lost": Fault(end=lambda g, begin, end: end - 1),
    "first term of the next group too": Fault(end=lambda g, begin, end: end + 1),
    "terms end at tiles": Fault(end=lambda g, begin, end: begin + (end - begin) // TILE * TILE),
    "offsets off by one": Fault(begin=lambda g, begin, end: begin - 1, end=lambda g, begin, end: end - 1),
    "result of the neighbour": Fault(matrix=lambda g, groups, begin, end: g + 1),
    "last group left out": Fault(groups=1),
    "empty group keeps old memory": Fault(keeps_empty=True),
    "terms behind a group times zero": Fault(leaks=True),
    "terms behind the last group": Fault(behind=True),
    "partial sums of 16 bits": Fault(narrow=True),
    "offsets read as sizes": Fault(sizes=True),
}
MUTANTS: dict[tuple[str, str], Callable[..., None]] = {
    **{("rows", name): functools.partial(of_rows, fault=fault) for name, fault in ROWS.items()},
    **{("terms", name): functools.partial(of_terms, fault=fault) for name, fault in TERMS.items()},
}
