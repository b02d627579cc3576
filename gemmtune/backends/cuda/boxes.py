"""Operands in swizzled stages: which operands TMA can copy there, and the boxes of 16-bit operands."""

from typing import Any

from ...problem import Layout, Problem
from ...toolchain.orientation import Oriented, orient
from ...toolchain.record import A, B, Swizzle, TensorMap
from ...toolchain.structs import strides_of
from .hopper import LINE_BYTES, SWIZZLED_LINES, TMA_BYTES

LINE = LINE_BYTES // 2
"""Elements of a swizzled line."""


def by_k(operand: Layout) -> bool | None:
    """Return True if K, the last dimension, is contiguous, False if the other one is, None if TMA cannot copy the operand."""
    aligned = TMA_BYTES // operand.dtype.itemsize
    *batch, row, col = operand.stride
    if operand.offset % aligned or any(stride % aligned for stride in batch):
        return None
    if col == 1 and row % aligned == 0 and row >= operand.size[-1]:
        return True
    return False if row == 1 and col % aligned == 0 and col >= operand.size[-2] else None


def operands_of(problem: Problem, *, swap_ab: bool) -> tuple[Layout, Layout, Oriented]:
    """Return p [rows, K] and q [cols, K], with a leading batch dimension if the problem has one, and the orientation."""
    oriented = orient(problem, swap_ab=swap_ab)
    return oriented.a, oriented.b.transposed, oriented


def batches(layout: Layout) -> int:
    """Return the number of matrices in an operand: one if all products share it."""
    return layout.size[0] if strides_of(layout).batch else 1


def grid_of(problem: Problem, config: Any) -> tuple[int, int]:
    """Return the number of tiles along the rows of p and of q that cover the result."""
    rows, cols = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    return -(-rows // config.shape.block_m), -(-cols // config.shape.block_n)


def why_not_boxes(problem: Problem) -> str | None:
    """Return the reason why TMA cannot copy an operand, or None."""
    return why_not_box("a", problem.a) or why_not_box("the transpose of b", problem.b.transposed)


def why_not_box(name: str, layout: Layout) -> str | None:
    """Return the reason why TMA cannot copy an operand with this name, or None."""
    if by_k(layout) is not None:
        return None
    return f"{name} has strides {layout.stride} and offset {layout.offset}: TMA copies rows or columns that are aligned to 16 bytes"


def why_not_staged(operand: Layout, extent: int, block_k: int, blocks: int) -> str | None:
    """Return the reason why ``blocks`` blocks cannot copy ``extent`` rows of an operand [rows, K] together to a stage, or None."""
    along_k = by_k(operand)
    if extent % LINE and not along_k:
        return f"an operand whose lines run across K is copied in lines of {LINE}, and a tile has {extent} columns"
    lines = extent if along_k else block_k
    if lines % (SWIZZLED_LINES * blocks):
        return f"{blocks} blocks copy {lines} lines for each other, in parts that have to be multiples of {SWIZZLED_LINES}"
    return None


def why_not_staged_tiles(problem: Problem, config: Any, block_k: int) -> str | None:
    """Return the reason why the tiles of a cluster cannot share copies of p and q, or None."""
    shape, (p, q, _) = config.shape, operands_of(problem, swap_ab=config.swap_ab)
    reason = why_not_staged(p, shape.block_m, block_k, shape.cluster_n)
    return reason or why_not_staged(q, shape.block_n, block_k, shape.cluster_m)


def staged_map(layout: Layout, operand: int, extent: int, block_k: int, blocks: int = 1) -> TensorMap:
    """Return the tensor map of an operand [rows, K] in boxes of ``extent`` swizzled lines, shared among ``blocks`` blocks."""
    along_k, strides, (rows, k) = bool(by_k(layout)), strides_of(layout), layout.size[-2:]
    length, lines, pitch = (k, rows, strides.row) if along_k else (rows, k, strides.col)
    return TensorMap(
        operand=operand,
        dtype=layout.dtype,
        sizes=(length, lines, batches(layout)),
        pitches=(pitch * 2, (strides.batch or pitch * lines) * 2),
        box=(LINE, (extent if along_k else block_k) // blocks, 1),
        swizzle=Swizzle.BYTES_128,
    )


def staged_maps(problem: Problem, config: Any, lines: tuple[int, int], block_k: int) -> tuple[TensorMap, TensorMap]:
    """Return the maps of p and q in boxes of ``lines``, shared among the blocks of a cluster that need them."""
    shape, (p, q, _) = config.shape, operands_of(problem, swap_ab=config.swap_ab)
    first, second = (B, A) if config.swap_ab else (A, B)
    map_of_p = staged_map(p, first, lines[0], block_k, shape.cluster_n)
    return map_of_p, staged_map(q, second, lines[1], block_k, shape.cluster_m)
