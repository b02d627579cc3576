"""What scales and zero points cover: their shapes, and the block of an operand that one number is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from ..errors import InvalidProblemError
from .layout import Layout

Scales = Literal["tensor", "row", "block_1x128", "block_128x128"]
"""The scales of scaled_mm: one scale for each operand; one for each row of a and each column of b; one for each 128 elements along
K of those; or for b one for each 128×128."""
WeightScales = Literal["none", "tensor", "column", "group_32", "group_64", "group_128"]
"""The scales of mixed_mm's b: none, one number, one for each column, or one for each so many elements along K of a column."""
SCALE_BLOCK = 128
"""Elements along K, and of square blocks along M or N too, that one scale of a block-scaled operand covers."""
GROUPS = (32, 64, 128)
"""Elements along K that share a scale of a weight."""

Blocks = tuple[tuple[int | None, int | None], ...]
"""Legal blocks (rows, columns) of an operand for one scale, fewer at its end; None: all there are."""
BLOCKS_OF_A: Blocks = ((None, None), (1, None), (1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK))
"""The blocks of a [M, K] of scaled_mm."""
BLOCKS_OF_B: Blocks = ((None, None), (None, 1), (SCALE_BLOCK, 1), (SCALE_BLOCK, SCALE_BLOCK))
"""The blocks of b [K, N] of scaled_mm."""
BLOCKS_OF_WEIGHTS: Blocks = ((None, None), (None, 1), *((group, 1) for group in GROUPS))
"""The blocks of b [K, N] of mixed_mm."""


def scale_layouts(m: int, n: int, k: int, scales: Scales) -> tuple[Layout, Layout]:
    """scale_a and scale_b of scaled_mm, float32, contiguous.

    Raises:
        InvalidProblemError: a name that ``Scales`` does not have.
    """
    kb, nb = -(-k // SCALE_BLOCK), -(-n // SCALE_BLOCK)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "tensor": ((), ()),
        "row": ((m, 1), (1, n)),
        "block_1x128": ((m, kb), (kb, n)),
        "block_128x128": ((m, kb), (kb, nb)),
    }
    first, second = shapes[_known(scales, shapes)]
    return Layout.contiguous(first, torch.float32), Layout.contiguous(second, torch.float32)


def weight_scale_layout(n: int, k: int, scales: WeightScales, dtype: torch.dtype) -> Layout | None:
    """scale_b, or zero_b, of mixed_mm, contiguous; None for ``none``.

    Raises:
        InvalidProblemError: a name that ``WeightScales`` does not have.
    """
    groups = {f"group_{group}": (-(-k // group), n) for group in GROUPS}
    shapes: dict[str, tuple[int, ...] | None] = {"none": None, "tensor": (), "column": (1, n), **groups}
    shape = shapes[_known(scales, shapes)]
    return None if shape is None else Layout.contiguous(shape, dtype)


def block_of(shape: tuple[int, ...], size: tuple[int, int], legal: Blocks) -> tuple[int, int] | None:
    """The block (rows, columns) of an operand of ``size`` that one element of a scale of ``shape`` is for; None if there is none.

    A scale of one element, of whatever rank, is for the whole operand. Of blocks with the same shape the first legal one counts:
    they differ only beyond the operand's end.
    """
    for (rows, cols), expected in zip(legal, scale_shapes(size, legal), strict=True):
        if shape in (expected, *(((), (1,)) if expected == (1, 1) else ())):
            return (max(size[0], 1) if rows is None else rows, max(size[1], 1) if cols is None else cols)
    return None


def scale_shapes(size: tuple[int, int], legal: Blocks) -> list[tuple[int, int]]:
    """The 2-D shapes that a scale of an operand of ``size`` can have, one for each of ``legal``."""
    return [(1 if rows is None else -(-size[0] // rows), 1 if cols is None else -(-size[1] // cols)) for rows, cols in legal]


def _known(name: str, legal: Mapping[str, object]) -> str:
    if name not in legal:
        raise InvalidProblemError(f"scales: got {name!r}, expected one of {', '.join(legal)}")
    return name
