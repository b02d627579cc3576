"""Layout of b for kernels that read each column along K: b unchanged if columns are contiguous, else packed."""

import torch

from ...problem import Layout, Problem
from .family import C, Family

FORMAT = "K in a row"
"""Layout name of a prepacked b."""
ALIGNED_BYTES = 16
"""Alignment of addresses and rows for direct copies."""


def columns_of(problem: Problem) -> Layout:
    """Return the layout of the transpose of b, packed if ``is_packed``."""
    columns = problem.b.transposed
    return Layout.contiguous(columns.size, columns.dtype) if is_packed(problem) else columns


def is_packed(problem: Problem) -> bool:
    """Return True if a packed tensor replaces a prepacked b because its columns cannot be copied, as in row-major order."""
    columns = problem.b.transposed
    overlap = columns.size[-2] > 1 and columns.stride[-2] < columns.size[-1]
    return problem.prepacked and (overlap or not has_aligned_rows(columns))


class ColumnsFamily(Family[C]):
    """Family whose kernels read each column of b [K, N], or [K/2, N] with two numbers in a byte, along K."""

    def packed_format(self, problem: Problem, config: C) -> str | None:  # noqa: ARG002 - one for all configs
        return FORMAT if is_packed(problem) else None

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        return b.t().contiguous().t()


def has_aligned_rows(layout: Layout) -> bool:
    """Return True if the rows of a matrix, or of each matrix of a batch, are contiguous and aligned."""
    (*batch, row, col), size = layout.stride, layout.dtype.itemsize
    if layout.size[0] > 1 and any(one == 0 or one * size % ALIGNED_BYTES for one in batch):
        return False
    pitched = layout.size[-2] == 1 or row * size % ALIGNED_BYTES == 0
    return (col == 1 or layout.size[-1] == 1) and pitched and layout.offset * size % ALIGNED_BYTES == 0
