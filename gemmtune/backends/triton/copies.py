"""The kernel that copies operands to aligned rows, with zeros appended."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...problem import Layout
from ...toolchain.render import template
from .source import PACKAGE, SIGNATURE_DTYPES, Argument, Source

__all__ = ["Copy", "copy_source"]

TILE_ELEMENTS = 1024
WIDEST_TILE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One operand to copy: from ``source`` to the row-major block [batch, rows, cols] (or its transpose) that ``target`` describes.

    ``turned`` tells that the operand's columns are the block's rows.
    """

    letter: str
    source: Layout
    target: Layout
    turned: bool

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of the copy, the columns being neighbours in memory."""
        size, stride = self.target.size, self.target.stride
        rows, cols = (size[-1], stride[-1]) if self.turned else (size[-2], stride[-2])
        return rows, cols

    @property
    def elements(self) -> int:
        """Elements of the copy over the whole batch."""
        rows, cols = self.block
        return self.batch * rows * cols

    @property
    def batch(self) -> int:
        """Matrices; 1 without a batch dimension."""
        return self.source.size[0] if len(self.source.size) == 3 else 1

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that one program copies."""
        cols = min(WIDEST_TILE, 1 << (self.block[1] - 1).bit_length())
        return TILE_ELEMENTS // cols, cols

    @property
    def programs(self) -> int:
        """Programs for one matrix."""
        (rows, cols), (tile_rows, tile_cols) = self.block, self.tile
        return -(-rows // tile_rows) * -(-cols // tile_cols)

    @property
    def constants(self) -> tuple[int, ...]:
        """The kernel's integers for this operand, in its order."""
        size, stride = self.source.size, self.source.stride
        rows, cols, row_stride, col_stride = size[-2], size[-1], stride[-2], stride[-1]
        if self.turned:
            rows, cols, row_stride, col_stride = cols, rows, col_stride, row_stride
        return (self.programs, rows, cols, *self.block, stride[0] if len(size) == 3 else 0, row_stride, col_stride)


@functools.lru_cache(maxsize=1024)
def copy_source(copies: tuple[Copy, ...], *, dependent: bool) -> Source:
    """The copying kernel for these operands. Sizes and strides are arguments; the tile and unit strides are part of the text.

    ``dependent``: it waits for the kernel before it by itself.
    """
    shapes = [(c.letter, *c.tile, c.constants[-1] == 1) for c in copies]
    text = template(PACKAGE, "pad.py.jinja").render(operands=shapes, dependent=dependent)
    pointers = [
        Argument(
            name=f"{c.letter}_{end}", type=f"*{SIGNATURE_DTYPES[c.source.dtype]}", source=("pointer", c.letter), divisor=divisor
        )
        for c in copies
        for end, divisor in (("from", 1), ("to", 16))
    ]
    numbers = [
        Argument(
            name=f"{c.letter}_{name}",
            type="i64" if "stride" in name else "i32",
            source=("runtime", name),
            divisor=16 if name == "to_cols" else 1,
        )
        for c in copies
        for name in ("programs", "rows", "cols", "to_rows", "to_cols", "batch_stride", "row_stride", "col_stride")
    ]
    return Source(text=text, function="gemmtune_pad", arguments=(*pointers, *numbers))
