"""Dense products that stand for other products: a sum of two products as [a c] @ [b; d], and a block-sparse product."""

import dataclasses

import torch

from ..problem import Layout, Problem
from ..problem.dtypes import is_float8
from .block_sparse import dense_problem, occupied, sparse_of
from .buffers import distinct_size, overlapping, placed
from .operands import Operands


def joined(problem: Problem) -> Problem:
    """Return the contiguous product [a c] @ [b; d], the dense product for a block-sparse b, or any other problem unchanged."""
    if problem.sparsity is not None:
        return dense_problem(problem)
    if problem.c is None:
        return problem
    batch = problem.out.size[:-2]
    left = Layout.contiguous((*batch, problem.m, problem.terms), problem.dtype)
    right = Layout.contiguous((*batch, problem.terms, problem.n), problem.dtype)
    return dataclasses.replace(problem, op="bmm" if problem.batched else "mm", a=left, b=right, c=None, d=None)


def parted(problem: Problem, operands: Operands) -> Operands:
    """Split operands of ``joined(problem)`` into a, b, c and d, in buffers of the problem's layouts with NaN around the
    elements.

    An operand whose elements share memory gets as many of the numbers as it can hold. A block-sparse b gets the blocks that
    have a nonzero element. It gets all blocks if some number is not finite, because an absent block may then change the
    result.
    """
    if problem.sparsity is not None:
        dense = operands.b.t()
        mask = occupied(dense, problem.sparsity)
        if not (_is_finite(operands.a) and _is_finite(operands.b)):
            mask = torch.ones_like(mask)
        weight = sparse_of(dense, mask, problem.sparsity)
        return dataclasses.replace(operands, weight=weight, scale_a=None, scale_b=None)  # the scales are ones
    if problem.c is None or problem.d is None:
        return operands
    k, left, right = problem.k, operands.a, operands.b
    return dataclasses.replace(
        operands,
        a=_held(problem.a, left[..., :k]),
        b=_held(problem.b, right[..., :k, :]),
        c=_held(problem.c, left[..., k:]),
        d=_held(problem.d, right[..., k:, :]),
    )


def _is_finite(x: torch.Tensor) -> bool:
    return not x.dtype.is_floating_point or bool((x.float() if is_float8(x.dtype) else x).isfinite().all())


def side_by_side(operands: Operands) -> Operands:
    """Return operands of the joined problem with the same numbers. They are copies if there are two products."""
    return dataclasses.replace(operands, a=operands.left, b=operands.right, c=None, d=None)


def _held(layout: Layout, values: torch.Tensor) -> torch.Tensor:
    if not overlapping(layout):
        return placed(layout, values.device, values[tuple(map(slice, distinct_size(layout)))])
    times = -(-layout.span // values.numel())
    return placed(layout, values.device, values.flatten().repeat(times)[: layout.span])
