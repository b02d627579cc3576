"""Kinds of strides by name, for traits, options and case ids.

The layout of an operand is ``kind[+pad][@offset][~batch]``. ``row+8@3`` is row-major, with eight elements of padding between rows,
and starts three elements past a 16-byte boundary. ``col~0`` is column-major with a batch stride of 0. In ``row~i`` the rows of
a batch's matrices alternate, as those of attention heads do.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..errors import CaseError
from ..problem import Layout

KINDS: dict[str, str] = {
    "row": "rows without gaps",
    "col": "columns without gaps",
    "padded": "rows or columns with a gap between them",
    "offset": "a first element that is not on a 16-byte boundary",
    "every2": "every second element of each row",
    "every3": "every third element of each column",
    "rows0": "one row, repeated by a stride of 0",
    "cols0": "one column, repeated by a stride of 0",
    "window": "rows that overlap in memory",
    "batch0": "one matrix for the whole batch, by a stride of 0",
    "batchgap": "a gap between the matrices of a batch",
    "interleaved": "the matrices of a batch in turn, row by row or column by column",
}
"""Names and meanings. In text: padded ``row+8``, offset ``row@3``, batch0 ``row~0``, batchgap ``row~1``, interleaved ``row~i``."""
BATCH_KINDS = {"0": "batch0", "1": "batchgap", "i": "interleaved"}
"""Kinds that only a batch has, by their mark."""

PLAIN = "row"
WINDOW_STEP = 3
"""Distance in elements between overlapping rows."""
BATCH_GAP = 24
_PATTERN = re.compile(
    r"(?!(?:every|rows0|cols0|window).*i$)(row|col|every2|every3|rows0|cols0|window)(?:\+(\d{1,18}))?(?:@(\d{1,18}))?(?:~([01i]))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandLayout:
    """Strides of one operand, for any size and dtype."""

    kind: str = PLAIN
    pad: int = 0
    offset: int = 0
    batch: str = ""

    @classmethod
    def parse(cls, text: str) -> "OperandLayout":
        """Return the layout of a text such as ``col+4@1``. Raises CaseError for any other text."""
        return _parsed(text)

    def __str__(self) -> str:
        pad = f"+{self.pad}" if self.pad else ""
        return f"{self.kind}{pad}{f'@{self.offset}' if self.offset else ''}{f'~{self.batch}' if self.batch else ''}"

    @property
    def kinds(self) -> frozenset[str]:
        """Names of ``KINDS`` that must be allowed for this layout."""
        names = {self.kind}
        names |= {"padded"} if self.pad else set()
        names |= {"offset"} if self.offset else set()
        return frozenset(names | {BATCH_KINDS[mark] for mark in self.batch})

    def layout(self, size: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """Return the layout of a tensor of that size: 0-D or 1-D (a bias), 2-D, or 3-D with a leading batch dimension."""
        batch, rows, cols = (1, 1, 1, *size)[-3:]
        turns = batch if self.batch == "i" else 1
        stride: tuple[int, int] = {
            "row": ((cols + self.pad) * turns, 1),
            "col": (1, (rows + self.pad) * turns),
            "every2": (2 * cols + self.pad, 2),
            "every3": (3, 3 * rows + self.pad),
            "rows0": (0, 1),
            "cols0": (1, 0),
            "window": (min(WINDOW_STEP, max(cols, 1)), 1),
        }[self.kind]
        span = 1 + max(rows - 1, 0) * stride[0] + max(cols - 1, 0) * stride[1]
        if self.kind in ("row", "every2"):
            span = max(span, rows * stride[0])
        elif self.kind in ("col", "every3"):
            span = max(span, cols * stride[1])
        between = {"0": 0, "1": span + BATCH_GAP, "i": max(stride) // turns}.get(self.batch, span)
        return Layout(size=size, stride=(between, *stride)[-len(size) :] if size else (), dtype=dtype, offset=self.offset)


@functools.cache
def _parsed(text: str) -> OperandLayout:
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise CaseError(
            f"layout: got {text!r}, expected kind[+pad][@offset][~0|~1|~i] with a kind out of row, col, every2, every3, rows0, "
            "cols0, window, and ~i only for row and col"
        )
    kind, pad, offset, batch = found.groups()
    return OperandLayout(kind=kind, pad=int(pad or 0), offset=int(offset or 0), batch=batch or "")


@functools.cache
def kinds_of_texts(*texts: str) -> frozenset[str]:
    """Return the names of ``KINDS`` that the layouts of all these texts need."""
    return frozenset[str]().union(*(OperandLayout.parse(text).kinds for text in texts))


def kinds_of(layout: Layout) -> Iterator[frozenset[str]]:
    """Yield each set of kinds that allows a layout if all its members are allowed. Strides without a kind yield no set.

    A single row or column fits several layouts at once, so there may be several sets.
    """
    *batch, rows, cols = (1, 1, *layout.size) if len(layout.size) < 2 else layout.size
    if layout.numel == 0:
        yield frozenset({PLAIN})
        return
    between, along, across = (0, 0, 0, *layout.stride)[-3:]
    lead = math.prod(batch)
    for kind, pad in _kinds_of_matrix(rows, cols, along, across):
        found = OperandLayout(kind=kind, pad=pad)
        size = (lead, rows, cols) if lead > 1 else (rows, cols)
        for text in ("", "0", "1") if lead > 1 else ("",):
            own = dataclasses.replace(found, batch=text)
            dense = dataclasses.replace(own, batch="").layout(size, layout.dtype).stride[0]
            if lead > 1 and between != {"": dense, "0": 0}.get(text, max(between, dense + 1)):
                continue
            yield dataclasses.replace(own, offset=layout.offset).kinds
    for kind, length, inner, outer in ((PLAIN, cols, across, along), ("col", rows, along, across)):
        lines = rows * cols // length
        if lead > 1 and between >= length and (inner == 1 or length == 1) and (outer == lead * between or lines == 1):
            yield OperandLayout(kind=kind, pad=between - length, offset=layout.offset, batch="i").kinds


def _kinds_of_matrix(rows: int, cols: int, along: int, across: int) -> Iterator[tuple[str, int]]:
    """Yield the kinds, with their padding, of a matrix with row stride ``along`` and column stride ``across``."""
    one_row, one_col = rows == 1, cols == 1
    if one_col or across == 1:
        yield from ((PLAIN, 0),) if one_row else ()
        yield from ((PLAIN, along - cols),) if along >= cols else ()
        yield from (("window", 0),) if not one_row and 0 < along < cols else ()
        yield from (("rows0", 0),) if not one_row and along == 0 else ()
    if one_row or along == 1:
        yield from (("col", 0),) if one_col else ()
        yield from (("col", across - rows),) if across >= rows else ()
        yield from (("cols0", 0),) if not one_col and across == 0 else ()
    if across == 2 and (one_row or along >= 2 * cols):
        yield "every2", 0 if one_row else along - 2 * cols
    if along == 3 and (one_col or across >= 3 * rows):
        yield "every3", 0 if one_col else across - 3 * rows
