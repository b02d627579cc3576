"""b as kernels read it that take K in a row: its columns as they lie or, where they lie otherwise, as a prepacked b is packed."""

from __future__ import annotations

import torch

from ...problem import Layout, Problem

FORMAT = "K in a row"
"""The name of the layout of a prepacked b."""
ALIGNED_BYTES = 16
"""The alignment of addresses and rows that are copied as they lie."""


def columns_of(problem: Problem) -> Layout:
    """The transpose of b, as it lies or as it is packed."""
    columns = problem.b.transposed
    return Layout.contiguous(columns.size, columns.dtype) if is_packed(problem) else columns


def is_packed(problem: Problem) -> bool:
    """Whether another tensor takes the place of b: a prepacked one whose columns cannot be copied, such as a row-major one."""
    columns = problem.b.transposed
    overlap = columns.size[-2] > 1 and columns.stride[-2] < columns.size[-1]
    return problem.prepacked and (overlap or not has_aligned_rows(columns))


def pack(b: torch.Tensor) -> torch.Tensor:
    """b [K, N], or two numbers in a byte [K/2, N], with the elements of a column as neighbours in memory."""
    return b.t().contiguous().t()


def has_aligned_rows(layout: Layout) -> bool:
    """Whether the rows of a matrix, or of each of a batch, are contiguous and aligned."""
    (*batch, row, col), size = layout.stride, layout.dtype.itemsize
    if layout.size[0] > 1 and any(one == 0 or one * size % ALIGNED_BYTES for one in batch):
        return False
    pitched = layout.size[-2] == 1 or row * size % ALIGNED_BYTES == 0
    return (col == 1 or layout.size[-1] == 1) and pitched and layout.offset * size % ALIGNED_BYTES == 0
