"""Which problems the kernel can serve, and with which configs: one predicate, without a GPU or a compiler."""

from __future__ import annotations

from ....device import DeviceInfo
from ....problem import Layout, Problem
from ....problem.rules import why_not_dense
from ....toolchain.orientation import Oriented, orient
from ..hopper import LINE_BYTES, MOST_CLUSTER, SWIZZLED_LINES, TMA_BYTES
from ..legality import why_not_epilogue, why_not_here
from .configs import Config

__all__ = ["by_k", "clusters_of", "grid_of", "operands_of", "tiles_of", "why_not", "why_not_config"]

MOST_TILES = 2**15
"""A dimension of a grid has up to 65535 blocks."""
WARP = 32
MOST_PARTS_BYTES = 2**28
ALIGNED, LINE = TMA_BYTES // 2, LINE_BYTES // 2
"""Elements that addresses and pitches are multiples of, and those of a line that TMA copies whole."""


def why_not(problem: Problem, device: DeviceInfo) -> str | None:
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


def operands_of(problem: Problem, *, swap_ab: bool) -> tuple[Layout, Layout, Oriented]:
    """p [rows, K] and q [cols, K], each with a batch dimension first where the problem has one; and the orientation."""
    oriented = orient(problem, swap_ab=swap_ab)
    return oriented.a, oriented.b.transposed, oriented


def grid_of(problem: Problem, config: Config) -> tuple[int, int]:
    """Tiles below and beside each other, as many as it takes to cover the result."""
    rows, cols = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    return -(-rows // config.shape.block_m), -(-cols // config.shape.block_n)


def clusters_of(problem: Problem, config: Config) -> int:
    """The clusters that cover the result once, over all of a batch: at its edges also with tiles that are beyond it."""
    below, beside = grid_of(problem, config)
    return -(-below // config.shape.cluster_m) * -(-beside // config.shape.cluster_n) * problem.batch


def tiles_of(problem: Problem, config: Config) -> int:
    """The tiles of those clusters."""
    return clusters_of(problem, config) * config.shape.cluster_tiles


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem with which ``why_not`` found nothing wrong, or None."""
    shape = config.shape
    if shape.shared_bytes > device.smem_per_block_bytes:
        return f"takes {shape.shared_bytes} bytes of shared memory, a block has {device.smem_per_block_bytes}"
    if shape.cluster > MOST_CLUSTER:
        return f"a cluster has {shape.cluster} blocks, at most {MOST_CLUSTER} can be relied on"
    most = WARP * shape.in_flight
    if config.clusters_per_tile > most:
        return f"{config.clusters_per_tile} clusters share a tile, at most {most} can"
    steps = -(-problem.k // shape.block_k)
    if config.parts > steps:
        return f"K has {steps} steps, too few for {config.parts} parts"
    return _room(problem, config) or _copies(problem, config)


def _room(problem: Problem, config: Config) -> str | None:
    """Why the tiles do not fit the grid, the clusters or the memory for their sums, or None."""
    shape, tiles = config.shape, tiles_of(problem, config)
    if tiles > MOST_TILES:
        return f"{tiles} tiles, at most {MOST_TILES} fit a grid"
    below, beside = grid_of(problem, config)
    if below < shape.cluster_m or beside < shape.cluster_n:
        return f"a cluster has {shape.cluster_m}x{shape.cluster_n} tiles, the result {below}x{beside}"
    parts_bytes = tiles * config.clusters_per_tile * shape.block_m * shape.block_n * 4 if config.clusters_per_tile > 1 else 0
    if parts_bytes > MOST_PARTS_BYTES:
        return f"{parts_bytes} bytes of sums in memory, at most {MOST_PARTS_BYTES}"
    return None


def _copies(problem: Problem, config: Config) -> str | None:
    """Why an operand cannot be copied in such boxes, or None."""
    shape = config.shape
    p, q, _ = operands_of(problem, swap_ab=config.swap_ab)
    for operand, extent, blocks in ((p, shape.block_m, shape.cluster_n), (q, shape.block_n, shape.cluster_m)):
        along_k = by_k(operand)
        if extent % LINE and not along_k:
            return f"an operand whose lines run across K is copied in lines of {LINE}, and a tile has {extent} columns"
        lines = extent if along_k else shape.block_k
        if lines % (SWIZZLED_LINES * blocks):
            return f"{blocks} blocks copy {lines} lines for each other, in parts that have to be multiples of {SWIZZLED_LINES}"
    return None
