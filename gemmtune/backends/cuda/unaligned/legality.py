"""Which problems the kernel can serve, and with which configs: one predicate, without a GPU or a compiler."""

from __future__ import annotations

from ....device import DeviceInfo
from ....problem import Layout, Problem
from ....problem.rules import why_not_dense
from ....toolchain.orientation import Oriented, orient
from ..legal import INT32_LIMIT, why_not_epilogue, why_not_here
from .configs import CLASSES, Config

__all__ = ["aligned", "by_k", "check_config", "check_problem", "copy_bytes", "grid_of", "operands_of"]

LEAST_K = CLASSES
"""Each class of lines across K has one: where it had none, what is copied in its place would be multiplied."""
MOST_BLOCKS = 8
"""Of a cluster, on every GPU that has clusters."""
ALIGNED = 8
"""Elements of 16 bytes: what TMA asks of addresses and pitches."""
COPIED = 64
"""Elements that the lines of an aligned copy are multiples of: 128 bytes, so that no box has a part of a line of L2."""
MOST_COPY_BYTES = 2**30
"""Of the workspace."""
MOST_TILES = 2**30
"""In one dimension of a grid."""


def check_problem(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no config at all can serve the problem on this device, or None."""
    reason = why_not_dense(problem) or why_not_here(problem, device)
    if reason is not None:
        return reason
    if problem.batch > 1:
        return f"a batch of {problem.batch} products: this kernel has one"
    if problem.k < LEAST_K:
        return f"K is {problem.k}, at least {LEAST_K} are needed"
    a, b = problem.a, problem.b.transposed
    for name, layout in (("a", a), ("the transpose of b", b)):
        if by_k(layout) is None:
            return f"{name} has strides {layout.stride}: rows or columns that are contiguous, and do not overlap, are copied"
    if aligned(a) and aligned(b):
        return "rows and columns of both operands are aligned to 16 bytes: other kernels copy them as they are"
    return why_not_epilogue(problem)


def by_k(operand: Layout) -> bool | None:
    """Whether K, the last dimension, is the contiguous one; None for an operand whose lines are not contiguous, or overlap."""
    row, col = operand.stride[-2:]
    if col == 1 and (row >= operand.size[-1] or operand.size[-2] == 1):
        return True
    return False if row == 1 and col >= operand.size[-2] else None


def aligned(operand: Layout) -> bool:
    """TMA can copy it as it is: its lines begin at multiples of 16 bytes."""
    return operand.offset % ALIGNED == 0 and _pitch(operand) % ALIGNED == 0 and _pitch(operand) > 0


def _pitch(operand: Layout) -> int:
    return operand.stride[-2] if by_k(operand) else operand.stride[-1]


def copy_bytes(operand: Layout) -> int:
    """Of a copy with aligned lines."""
    length, lines = operand.size[-1], operand.size[-2]
    if not by_k(operand):
        length, lines = lines, length
    return -(-length // COPIED) * COPIED * lines * operand.dtype.itemsize


def operands_of(problem: Problem, *, swapped: bool) -> tuple[Layout, Layout, Oriented]:
    """p [rows, K], which is shifted, and q [cols, K]; and the orientation."""
    oriented = orient(problem, exchanged=swapped)
    return oriented.a, oriented.b.transposed, oriented


def grid_of(problem: Problem, config: Config) -> tuple[int, int]:
    """Tiles below and beside each other: whole clusters of them."""
    shape = config.shape
    rows, cols = (problem.n, problem.m) if config.swapped else (problem.m, problem.n)
    return -(-rows // shape.rows), -(-cols // (shape.cols * shape.cluster)) * shape.cluster


def check_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem with which ``check_problem`` found nothing wrong, or None."""
    shape = config.shape
    p, q, _ = operands_of(problem, swapped=config.swapped)
    if aligned(p):
        return "the operand that would be shifted is aligned, the other is not"
    shared_bytes = shape.shared_bytes(p_by_k=bool(by_k(p)))
    if shared_bytes > device.smem_per_block_bytes:
        return f"takes {shared_bytes} bytes of shared memory, a block has {device.smem_per_block_bytes}"
    if shape.cluster > MOST_BLOCKS:
        return f"a cluster has {shape.cluster} blocks, at most {MOST_BLOCKS} can be relied on"
    if not aligned(q) and copy_bytes(q) > MOST_COPY_BYTES:
        return f"an aligned copy has {copy_bytes(q)} bytes, at most {MOST_COPY_BYTES}"
    return _room(problem, config, (p, q))


def _room(problem: Problem, config: Config, operands: tuple[Layout, Layout]) -> str | None:
    """Why tiles do not fit the grid or the clusters, or lines do not fit 32 bits, or None."""
    shape, (below, beside) = config.shape, grid_of(problem, config)
    if below * beside > MOST_TILES:
        return f"{below * beside} tiles, at most {MOST_TILES} fit a grid"
    rows, cols = operands[0].size[-2], operands[1].size[-2]
    tiles = -(-cols // shape.cols)
    if tiles < shape.cluster:
        return f"a cluster has {shape.cluster} tiles beside each other, the result {tiles}"
    if max(rows, cols, problem.k) >= INT32_LIMIT - 2**16:
        return "tiles beyond the edge do not fit 32 bits"
    return None
