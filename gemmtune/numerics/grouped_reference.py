"""References of grouped products: a float64 product of values and of magnitudes for each group."""

from __future__ import annotations

import math

import torch

from ..problem import Problem
from ..problem.scales import SCALE_BLOCK
from .operands import Operands
from .quantized import numbers
from .reference import Region, products
from .routed import added_up, rows_of


def of_rows(
    problem: Problem, operands: Operands, pieces: list[tuple[int, int]], region: Region
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a @ b[g] and |a| @ |b[g]| for the rows of each group.

    Rows of no group are 0 with a magnitude of NaN. Gated columns give both halves. If rows are added up, return the sums.
    """
    result = region
    region = rows_of(problem, operands, region)
    device = operands.a.device
    rows = torch.arange(problem.m, device=device) if region.rows is None else region.rows
    cols = problem.b.size[-1] if region.cols is None else len(region.cols)
    value = torch.zeros((1, len(rows), cols), dtype=torch.float64, device=device)
    magnitude = torch.full_like(value, math.nan)
    starts = torch.searchsorted(rows, torch.tensor(pieces, device=device)).tolist()
    for g, (first, last) in enumerate(starts):
        if first < last:
            matrix = _matrix(problem, operands, g)
            right = matrix if region.cols is None else matrix[:, region.cols]
            value[:, first:last], magnitude[:, first:last] = _product(_lines(operands, rows[first:last]), right)
    return (value, magnitude) if problem.weights is None else added_up(problem, operands, result, value, magnitude)


def _lines(operands: Operands, rows: torch.Tensor) -> torch.Tensor:
    """Return the values of rows of a, with scales applied."""
    if operands.rows is not None:
        rows = operands.rows[rows]
    if operands.scale_a is None:
        return operands.a[rows]
    values, scale = operands.a.double()[rows], operands.scale_a[rows].double()
    return values * _spread(scale, values.shape[1], 1, SCALE_BLOCK)


def _matrix(problem: Problem, operands: Operands, group: int) -> torch.Tensor:
    """Return the values of a group's b, with scales applied."""
    if operands.scale_b is None:
        return operands.b[group]
    values, scale = numbers(operands.b[group], operands.encoding).double(), operands.scale_b[group].double()
    rows, cols = problem.scale_block("scale_b")
    return values * _spread(_spread(scale, values.shape[0], 0, rows), values.shape[1], 1, cols)


def _spread(scale: torch.Tensor, size: int, dim: int, block: int) -> torch.Tensor:
    """Expand a scale to one number for each line along ``dim``, or keep its one number for all lines."""
    return scale if scale.shape[dim] == 1 else scale.repeat_interleave(block, dim).narrow(dim, 0, size)


def of_terms(
    problem: Problem, operands: Operands, pieces: list[tuple[int, int]], region: Region
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a[:, g] @ b[g] for the terms of each group, and the product of magnitudes."""
    a, b = operands.a, operands.b
    left, right = Region(rows=region.rows).of(a), Region(cols=region.cols).of(b)
    size = (problem.groups, left.shape[0], right.shape[1])
    value, magnitude = (torch.zeros(size, dtype=torch.float64, device=a.device) for _ in range(2))
    for g, (begin, end) in enumerate(pieces):
        if begin < end:
            value[g : g + 1], magnitude[g : g + 1] = _product(left[:, begin:end], right[begin:end])
    return value, magnitude


def _product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product and the product of magnitudes, both [1, M, N].

    A NaN magnitude becomes infinite, so that any result is correct. An infinite one becomes the largest number, so that
    only the expected value is correct.
    """
    value, magnitude = products(a.unsqueeze(0), b.unsqueeze(0))
    return value, magnitude.nan_to_num(nan=math.inf)
