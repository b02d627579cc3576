"""Which problems the kernel can serve, and with which configs: one predicate, without a GPU or a compiler."""

from __future__ import annotations

from ....device import DeviceInfo
from ....problem import Layout, Problem
from ....problem.rules import why_not_dense
from ....toolchain.orientation import Oriented, orient
from ..legal import why_not_epilogue, why_not_here
from .configs import Config

__all__ = ["by_k", "check_config", "check_problem", "operands_of", "spreads_of", "tiles_of"]

MOST_TILES = 2**15
"""A dimension of a grid has up to 65535 blocks."""
MOST_BLOCKS = 8
"""Of a cluster, on every GPU that has clusters."""
WARP = 32
MOST_PARTS_BYTES = 2**28
ALIGNED = 8
"""Elements of 16 bytes: what TMA asks of addresses and pitches."""
LINE = 64
"""Elements of a line of 128 bytes, which TMA copies whole."""
SWIZZLED_LINES = 8
"""The pattern in which TMA stores them repeats itself after as many."""


def check_problem(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no config at all can serve the problem on this device, or None."""
    reason = why_not_dense(problem) or why_not_here(problem, device)
    if reason is not None:
        return reason
    for name, layout in (("a", problem.a), ("the transpose of b", problem.b.transposed)):
        if by_k(layout) is None:
            where = f"{name} has strides {layout.stride} and offset {layout.offset}"
            return f"{where}: TMA copies rows or columns that are aligned to 16 bytes"
    return why_not_epilogue(problem)


def by_k(operand: Layout) -> bool | None:
    """Whether K, the last dimension, is the contiguous one; None for an operand that TMA cannot copy."""
    *batch, row, col = operand.stride
    if operand.offset % ALIGNED or any(stride % ALIGNED for stride in batch):
        return None
    if col == 1 and row % ALIGNED == 0 and row >= operand.size[-1]:
        return True
    return False if row == 1 and col % ALIGNED == 0 and col >= operand.size[-2] else None


def operands_of(problem: Problem, *, swapped: bool) -> tuple[Layout, Layout, Oriented]:
    """p [rows, K] and q [cols, K], each with a batch dimension first where the problem has one; and the orientation."""
    oriented = orient(problem, exchanged=swapped)
    return oriented.a, oriented.b.transposed, oriented


def _grid(problem: Problem, config: Config) -> tuple[int, int]:
    """Tiles below and beside each other, as many as it takes to cover the result."""
    rows, cols = (problem.n, problem.m) if config.swapped else (problem.m, problem.n)
    return -(-rows // config.shape.rows), -(-cols // config.shape.cols)


def spreads_of(problem: Problem, config: Config) -> int:
    """The clusters that cover the result once, over all of a batch: at its edges also with tiles that are beyond it."""
    below, beside = _grid(problem, config)
    return -(-below // config.shape.spread_rows) * -(-beside // config.shape.spread_cols) * problem.batch


def tiles_of(problem: Problem, config: Config) -> int:
    """Those of ``spreads_of`` clusters."""
    return spreads_of(problem, config) * config.shape.spread


def check_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem with which ``check_problem`` found nothing wrong, or None."""
    shape = config.shape
    if shape.shared_bytes > device.smem_per_block_bytes:
        return f"takes {shape.shared_bytes} bytes of shared memory, a block has {device.smem_per_block_bytes}"
    if shape.cluster > MOST_BLOCKS:
        return f"a cluster has {shape.cluster} blocks, at most {MOST_BLOCKS} can be relied on"
    most = WARP * shape.at_once
    if config.groups > most:
        return f"{config.groups} clusters share a tile, at most {most} can"
    steps = -(-problem.k // shape.depth)
    if config.parts > steps:
        return f"K has {steps} steps, too few for {config.parts} parts"
    return _room(problem, config) or _copies(problem, config)


def _room(problem: Problem, config: Config) -> str | None:
    """Why the tiles do not fit the grid, the clusters or the memory for their sums, or None."""
    shape, tiles = config.shape, tiles_of(problem, config)
    if tiles > MOST_TILES:
        return f"{tiles} tiles, at most {MOST_TILES} fit a grid"
    below, beside = _grid(problem, config)
    if below < shape.spread_rows or beside < shape.spread_cols:
        return f"a cluster has {shape.spread_rows}x{shape.spread_cols} tiles, the result {below}x{beside}"
    parts_bytes = tiles * config.groups * shape.rows * shape.cols * 4 if config.groups > 1 else 0
    if parts_bytes > MOST_PARTS_BYTES:
        return f"{parts_bytes} bytes of sums in memory, at most {MOST_PARTS_BYTES}"
    return None


def _copies(problem: Problem, config: Config) -> str | None:
    """Why an operand cannot be copied in such boxes, or None."""
    shape = config.shape
    p, q, _ = operands_of(problem, swapped=config.swapped)
    for operand, extent, blocks in ((p, shape.rows, shape.spread_cols), (q, shape.cols, shape.spread_rows)):
        along_k = by_k(operand)
        if extent % LINE and not along_k:
            return f"an operand whose lines run across K is copied in lines of {LINE}, and a tile has {extent} columns"
        lines = extent if along_k else shape.depth
        if lines % (SWIZZLED_LINES * blocks):
            return f"{blocks} blocks copy {lines} lines for each other, in parts that have to be multiples of {SWIZZLED_LINES}"
    return None
