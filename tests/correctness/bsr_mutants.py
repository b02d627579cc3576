"""Block-sparse products that go wrong in known ways: ``function(out, a, values, crow, col)`` for out = a @ weightᵀ."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one product does otherwise."""

    column: Callable[[int, int, int, int], int] = lambda col, i, first, last: col
    """The block column that is read for block i of a row whose blocks are first to last - 1."""
    first: int = 0
    """Blocks left out at the beginning of a row."""
    last: int = 0
    """Blocks left out at its end, or read beyond it where negative."""
    rows: int = 0
    """Block rows left out at the end."""
    transposed: bool = False
    repeated: bool = False
    """The first block counts twice."""
    keeps_empty: bool = False
    """Rows without blocks are not written."""
    least: int = 0
    """Rows of at least so many blocks end there."""
    nan_of_absent: bool = False
    narrow: bool = False


def product(out: Tensor, a: Tensor, values: Tensor, crow: Tensor, col: Tensor, *, fault: Fault) -> None:
    """out = a @ weightᵀ, block by block, with a fault."""
    starts, places = crow.tolist(), col.tolist()
    _, block_n, block_k = values.shape
    rows = len(starts) - 1 - fault.rows
    for row in range(rows):
        first, last = starts[row] + fault.first, min(max(starts[row + 1] - fault.last, 0), len(places))
        last = min(last, first + fault.least) if fault.least else last
        if first >= last and fault.keeps_empty:
            continue
        total = a.new_zeros((a.shape[0], block_n))
        for i in range(first, last):
            place = fault.column(places[i], i, starts[row], starts[row + 1]) * block_k
            block = values[i].t() if fault.transposed else values[i]
            part = a[:, place : place + block_k] @ block.t()
            total += part.bfloat16().float() if fault.narrow else part
            total += part if fault.repeated and i == first else 0
        if fault.nan_of_absent:
            total += 0 * a.sum(dim=1, keepdim=True)
        out[:, row * block_n : (row + 1) * block_n] = total


FAULTS: dict[str, Fault] = {
    "right": Fault(),
    "column of the block before at row ends": Fault(column=lambda c, i, first, last: max(c - 1, 0) if i == last - 1 else c),
    "first column at row begins": Fault(column=lambda c, i, first, last: 0 if i == first else c),
    "position for column": Fault(column=lambda c, i, first, last: i - first),
    "last block of a row left out": Fault(last=1),
    "first block of a row left out": Fault(first=1),
    "first block of the next row too": Fault(last=-1),
    "last panel left out": Fault(rows=1),
    "block transposed": Fault(transposed=True),
    "first block twice": Fault(repeated=True),
    "empty row keeps old memory": Fault(keeps_empty=True),
    "long rows end early": Fault(least=3),
    "NaN beside absent blocks": Fault(nan_of_absent=True),
    "partial sums of 16 bits": Fault(narrow=True),
}
MUTANTS: dict[str, Callable[..., None]] = {name: functools.partial(product, fault=fault) for name, fault in FAULTS.items()}
