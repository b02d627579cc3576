"""A config: what is compiled, a ``Shape`` of the kernel, and what a launch is told."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEPTH", "SHAPES", "Config", "Shape"]

DEPTH = 64
"""Elements of K in a stage: a line of q has 128 bytes."""
BYTES = 227 * 1024
"""Of shared memory that a block can have."""
MOST_STAGES = 8
BARRIER_BYTES = 8
CLASSES = 8
"""Every eighth line of p begins equally far from an address of 16 bytes: as many tensors of aligned lines cover it."""
MORE = 8
"""Elements that a line of p has beyond those of the tile: up to seven of them are before these."""
DISPLACED = 48
"""Elements by which lines across K begin earlier or later in shared memory, so that lines next to each other are in other banks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of the kernel: a tile of ``rows`` by ``cols`` sums.

    A cluster has ``cluster`` tiles beside each other, and copies their lines of p once.
    """

    rows: int
    cols: int
    cluster: int = 1

    @property
    def shifts_registers(self) -> bool:
        """The sums need more than an equal share of the registers: the warp group that copies gives some of its own."""
        return self.rows > 64 and self.cols > 128

    @property
    def threads(self) -> int:
        """Of a block: a warp group for each 64 rows, and two warps that copy, of a warp group where registers are given."""
        return 2 * self.rows + (128 if self.shifts_registers else 64)

    def stage_bytes(self, *, p_by_k: bool) -> int:
        """Of the operands in one stage, ``p`` with its lines along or across K."""
        p = self.rows * (DEPTH + MORE) if p_by_k else DEPTH * (self.rows + MORE + DISPLACED)
        return 2 * (p + self.cols * DEPTH)

    def stages(self, *, p_by_k: bool) -> int:
        """As many as there is room for."""
        each = self.stage_bytes(p_by_k=p_by_k) + 2 * BARRIER_BYTES
        return min(BYTES // each, MOST_STAGES)

    def shared_bytes(self, *, p_by_k: bool) -> int:
        """Of a block: stages, in whose place results are put at the end, and their barriers."""
        return self.stages(p_by_k=p_by_k) * (self.stage_bytes(p_by_k=p_by_k) + 2 * BARRIER_BYTES)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}" + (f"_1x{self.cluster}" if self.cluster > 1 else "")


SHAPES: tuple[Shape, ...] = (
    Shape(rows=128, cols=256, cluster=2),
    Shape(rows=128, cols=128, cluster=2),
    Shape(rows=64, cols=256),
)
"""The first for long sums and large results, the others for sums of few steps.

Results that smaller tiles would suit take less time with aligned copies, on an H200.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """``swapped``: outᵀ = bᵀ aᵀ, so that b is p, the operand that is shifted.

    ``pdl``: the launch may begin before the one before it has ended. ``band``: as many tiles below each other are done before
    those beside them.
    """

    shape: Shape
    swapped: bool = False
    pdl: bool = True
    band: int = 8

    def __str__(self) -> str:
        return f"{self.shape}_b{self.band}{'_swap' if self.swapped else ''}{'_pdl' if self.pdl else ''}"
