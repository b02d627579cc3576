"""Kinds of strides by name, as traits, options and case ids have them.

An operand's layout is ``kind[+pad][@offset][~batch]``: ``row+8@3`` is row-major with eight elements of padding between rows, three
elements past a 16-byte boundary; ``col~0`` is column-major with a batch stride of 0.
"""

from __future__ import annotations

import re
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
    "rows0": "one row, repeated by a stride of 0",
    "cols0": "one column, repeated by a stride of 0",
    "window": "rows that overlap in memory",
    "batch0": "one matrix for the whole batch, by a stride of 0",
    "batchgap": "a gap between the matrices of a batch",
}
"""Name to meaning. As text: padded ``row+8``, offset ``row@3``, batch0 ``row~0``, batchgap ``row~1``."""

PLAIN = "row"
WINDOW_STEP = 3
"""Elements from one overlapping row to the next."""
BATCH_GAP = 24
_PATTERN = re.compile(r"(row|col|every2|rows0|cols0|window)(?:\+(\d+))?(?:@(\d+))?(?:~([01]))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandLayout:
    """The strides of one operand, of any size and dtype."""

    kind: str = PLAIN
    pad: int = 0
    offset: int = 0
    batch: str = ""

    @classmethod
    def parse(cls, text: str) -> OperandLayout:
        """The layout of a text such as ``col+4@1``. Raises CaseError for any other text."""
        found = _PATTERN.fullmatch(text)
        if found is None:
            raise CaseError(
                f"layout: got {text!r}, expected kind[+pad][@offset][~0|~1] "
                "with a kind out of row, col, every2, rows0, cols0, window"
            )
        kind, pad, offset, batch = found.groups()
        return cls(kind=kind, pad=int(pad or 0), offset=int(offset or 0), batch=batch or "")

    def __str__(self) -> str:
        pad = f"+{self.pad}" if self.pad else ""
        return f"{self.kind}{pad}{f'@{self.offset}' if self.offset else ''}{f'~{self.batch}' if self.batch else ''}"

    @property
    def kinds(self) -> frozenset[str]:
        """The names of ``KINDS`` that have to be allowed for this layout."""
        names = {self.kind}
        names |= {"padded"} if self.pad else set()
        names |= {"offset"} if self.offset else set()
        return frozenset(names | {"0": {"batch0"}, "1": {"batchgap"}}.get(self.batch, set()))

    def layout(self, size: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """The layout of a tensor of that size, 0-D or 1-D (a bias), 2-D, or 3-D with a batch dimension first."""
        rows, cols = (1, 1, *size)[-2:]
        stride: tuple[int, int] = {
            "row": (cols + self.pad, 1),
            "col": (1, rows + self.pad),
            "every2": (2 * cols + self.pad, 2),
            "rows0": (0, 1),
            "cols0": (1, 0),
            "window": (min(WINDOW_STEP, max(cols, 1)), 1),
        }[self.kind]
        span = 1 + max(rows - 1, 0) * stride[0] + max(cols - 1, 0) * stride[1]
        if self.kind in ("row", "every2"):
            span = max(span, rows * stride[0])
        elif self.kind == "col":
            span = max(span, cols * stride[1])
        between = 0 if self.batch == "0" else span + (BATCH_GAP if self.batch == "1" else 0)
        return Layout(size=size, stride=(between, *stride)[-len(size) :] if size else (), dtype=dtype, offset=self.offset)
