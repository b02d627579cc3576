"""Scales and zero points: their shapes, and the block of an operand that one element covers."""

from collections.abc import Mapping

import torch

from ..errors import InvalidProblemError
from ..operand_kinds import Scales as Scales
from ..operand_kinds import WeightScales as WeightScales
from .layout import Layout

SCALE_BLOCK = 128
"""Elements along K that one scale of a block-scaled operand covers. Square blocks cover as many along M or N."""
GROUPS = (32, 64, 128)
"""Group sizes of weights: elements along K that share a scale."""

Blocks = tuple[tuple[int | None, int | None], ...]
"""Legal blocks (rows, columns) of an operand for one scale. The last block may be smaller. None means the whole dimension."""
BLOCKS_OF_A: Blocks = ((None, None), (1, None), (1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK))
"""The blocks of a [M, K] in scaled_mm."""
BLOCKS_OF_B: Blocks = ((None, None), (None, 1), (SCALE_BLOCK, 1), (SCALE_BLOCK, SCALE_BLOCK))
"""The blocks of b [K, N] in scaled_mm."""
BLOCKS_OF_WEIGHTS: Blocks = ((None, None), (None, 1), *((group, 1) for group in GROUPS))
"""The blocks of b [K, N] in mixed_mm."""


def scale_layouts(m: int, n: int, k: int, scales: Scales) -> tuple[Layout, Layout]:
    """Return scale_a and scale_b of scaled_mm, float32 and contiguous. Raises InvalidProblemError for unknown ``scales``."""
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
    """Return scale_b or zero_b of mixed_mm, contiguous; None for ``none``. Raises InvalidProblemError for unknown ``scales``."""
    groups = {f"group_{group}": (-(-k // group), n) for group in GROUPS}
    shapes: dict[str, tuple[int, ...] | None] = {"none": None, "tensor": (), "column": (1, n), **groups}
    shape = shapes[_known(scales, shapes)]
    return None if shape is None else Layout.contiguous(shape, dtype)


def block_of(shape: tuple[int, ...], size: tuple[int, int], legal: Blocks) -> tuple[int, int] | None:
    """Return the (rows, columns) that an element of a scale covers, or None; all for a single one, else the first legal block."""
    for (rows, cols), expected in zip(legal, scale_shapes(size, legal), strict=True):
        if shape in (expected, *(((), (1,)) if expected == (1, 1) else ())):
            return (max(size[0], 1) if rows is None else rows, max(size[1], 1) if cols is None else cols)
    return None


def scale_shapes(size: tuple[int, int], legal: Blocks) -> list[tuple[int, int]]:
    """Return the 2-D shapes that a scale of an operand of ``size`` can have, one for each block in ``legal``."""
    return [(1 if rows is None else -(-size[0] // rows), 1 if cols is None else -(-size[1] // cols)) for rows, cols in legal]


def _known(name: str, legal: Mapping[str, object]) -> str:
    if name not in legal:
        raise InvalidProblemError(f"scales: got {name!r}, expected one of {', '.join(legal)}")
    return name
