"""A sum of two products as one, [a c] @ [b; d], and a block-sparse product as a dense one: what is known of a product holds."""

from __future__ import annotations

import dataclasses

import torch

from ..problem import Layout, Problem
from ..problem.dtypes import is_float8
from .block_sparse import dense_problem, occupied, sparse_of
from .buffers import distinct_size, overlapping, placed
from .operands import Operands


def joined(problem: Problem) -> Problem:
    """The product of a contiguous [a c] and [b; d]; that of a block-sparse b as if it were dense; any other as it is."""
    if problem.sparsity is not None:
        return dense_problem(problem)
    if problem.c is None:
        return problem
    left = Layout.contiguous((problem.m, problem.terms), problem.dtype)
    right = Layout.contiguous((problem.terms, problem.n), problem.dtype)
    return dataclasses.replace(problem, op="mm", a=left, b=right, c=None, d=None)


def parted(problem: Problem, operands: Operands) -> Operands:
    """Operands of ``joined(problem)`` as a, b, c and d in buffers of the problem's layouts, with NaN around their elements.

    An operand whose elements share memory gets as many of the numbers as it can hold. Of a block-sparse b those blocks exist that
    are not zero throughout, or all where some number is not finite, since it may then be known of no other what it gives.
    """
    if problem.sparsity is not None:
        dense = operands.b.t()
        mask = occupied(dense, problem.sparsity)
        if not (_is_finite(operands.a) and _is_finite(operands.b)):
            mask = torch.ones_like(mask)
        weight = sparse_of(dense, mask, problem.sparsity)
        return dataclasses.replace(operands, weight=weight, scale_a=None, scale_b=None)  # which are ones
    if problem.c is None or problem.d is None:
        return operands
    k, left, right = problem.k, operands.a, operands.b
    return dataclasses.replace(
        operands,
        a=_held(problem.a, left[:, :k]),
        b=_held(problem.b, right[:k]),
        c=_held(problem.c, left[:, k:]),
        d=_held(problem.d, right[k:]),
    )


def _is_finite(x: torch.Tensor) -> bool:
    return not x.dtype.is_floating_point or bool((x.float() if is_float8(x.dtype) else x).isfinite().all())


def side_by_side(operands: Operands) -> Operands:
    """Operands of the joined problem with the numbers of these: copies, where there are two products."""
    return dataclasses.replace(operands, a=operands.left, b=operands.right, c=None, d=None)


def _held(layout: Layout, values: torch.Tensor) -> torch.Tensor:
    if not overlapping(layout):
        rows, cols = distinct_size(layout)
        return placed(layout, values.device, values[:rows, :cols])
    times = -(-layout.span // values.numel())
    return placed(layout, values.device, values.flatten().repeat(times)[: layout.span])
