"""One product that replaces several of the same input: a function that writes into ``out``, and an operator of torch.

The weights are adjacent in memory when the graph is compiled. Each call compares their addresses. If the model was copied or moved
since, so that they are no longer adjacent, each weight is multiplied separately, and the results are copied into ``out``.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ...dispatch.plan import Plan
from ...dispatch.wholes import gathered, whole
from ...problem import Layout, Problem
from ...problem.layout import ALIGNED_BYTES
from .planned import LIBRARY, problem_of_text, ready_launch, ready_plan, run_as_laid_out, run_planned

Tensor = torch.Tensor

LIBRARY.define("planned_join(Tensor[] tensors, str problem, int[] widths, *, bool dynamic=False) -> Tensor")  # type: ignore[no-untyped-call]
OPERATOR = torch.ops.gemmtune.planned_join.default
"""Operator of a horizontal fusion. ``tensors`` are a, then the pieces of each further operand. ``widths`` are their columns.

With ``dynamic`` the M of ``problem`` is an example, and each call looks up the plan for its own M.
"""
SCALES = ("scale_b", "zero_b")
_CAPACITY = 4096


def ready_horizontal(problem: Problem, widths: Sequence[int], index: int) -> Plan:
    """Make the plans of the whole product and of its parts before any capture, and return the plan of the whole."""
    ready_pieces(problem.key, widths, index)
    return ready_plan(problem, index)


def ready_pieces(problem: str, widths: Sequence[int], index: int) -> None:
    """Make the launches of the separate products."""
    for part in _parts(problem, tuple(widths)):
        ready_launch(part, index)


def run_horizontal(*tensors: Tensor, out: Tensor, problem: str, widths: Sequence[int], dynamic: bool = False) -> None:
    """Write the products of a with all pieces into ``out``."""
    a, count = tensors[0], len(widths)
    roles = [tensors[begin : begin + count] for begin in range(1, len(tensors), count)]
    alone = [None if gather else whole(pieces) for pieces, gather in zip(roles, _gathered(problem), strict=True)]
    if all(gather or x is not None for gather, x in zip(_gathered(problem), alone, strict=True)):
        operands = [gathered(pieces) if x is None else x for pieces, x in zip(roles, alone, strict=True)]
        run_planned(a, *operands, out=out, problem=problem, dynamic=dynamic)
        return
    for part, columns, *pieces in zip(_parts(problem, tuple(widths)), torch.split(out, list(widths), 1), *roles, strict=True):
        run = run_planned if not dynamic and _fits(part, pieces) else run_as_laid_out
        result = columns.new_empty(columns.shape)  # a weight's table serves packed results, and not columns of a wider one
        run(a, *pieces, out=result, problem=part)
        columns.copy_(result)


@functools.lru_cache(_CAPACITY)
def gathered_roles(problem: Problem) -> tuple[str, ...]:
    """Return the operands whose pieces are copied together: scales and zero points of groups along K.

    Each weight stores them row by row, so that the columns of several weights are not adjacent in memory.
    """
    return tuple(role for role, layout in problem.operands if role in SCALES and len(layout.size) == 2 and layout.size[0] > 1)


@functools.lru_cache(_CAPACITY)
def _gathered(problem: str) -> tuple[bool, ...]:
    """Return for each operand except a True if its pieces are copied together."""
    known = problem_of_text(problem)
    copied = gathered_roles(known)
    return tuple(role in copied for role, _ in known.operands if role != "a")


@functools.lru_cache(_CAPACITY)
def _parts(problem: str, widths: tuple[int, ...]) -> tuple[str, ...]:
    """Return the keys of the separate products."""
    known, ends = problem_of_text(problem), itertools.accumulate(widths)
    return tuple(_part_of(known, end - width, end).key for width, end in zip(widths, ends, strict=True))


def _part_of(problem: Problem, begin: int, end: int) -> Problem:
    """Return the Problem of columns ``begin`` to ``end``, with a packed result."""
    copied = (*gathered_roles(problem), "out")

    def columns(role: str, layout: Layout) -> Layout:
        size = (*layout.size[:-1], end - begin)
        if role in copied:
            return Layout.contiguous(size, layout.dtype)
        offset = (layout.offset + begin * layout.stride[-1]) % max(1, ALIGNED_BYTES // layout.dtype.itemsize)
        return dataclasses.replace(layout, size=size, offset=offset)

    wholes = [(role, layout) for role, layout in problem.operands if role != "a"] + [("out", problem.out)]
    fields: dict[str, Any] = {role: columns(role, layout) for role, layout in wholes}
    return dataclasses.replace(problem, **fields)


def _fits(part: str, pieces: Sequence[Tensor]) -> bool:
    """Return True if the operands except a have the strides of the problem."""
    layouts = [layout for role, layout in problem_of_text(part).operands if role != "a"]
    return all(_strides(layout) == _strides(Layout.of(x)) for layout, x in zip(layouts, pieces, strict=True))


def _strides(layout: Layout) -> list[int]:
    return [stride for size, stride in zip(layout.size, layout.stride, strict=True) if size > 1]


def _new(tensors: Sequence[Tensor], problem: str, widths: Sequence[int], *, dynamic: bool = False) -> Tensor:
    out = _empty(tensors, problem, widths)
    run_horizontal(*tensors, out=out, problem=problem, widths=widths, dynamic=dynamic)
    return out


def _empty(tensors: Sequence[Tensor], problem: str, widths: Sequence[int], **_: object) -> Tensor:
    return tensors[0].new_empty((tensors[0].shape[0], sum(widths)), dtype=problem_of_text(problem).out.dtype)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("planned_join", _new, _device)  # type: ignore[no-untyped-call]
torch.library.register_fake("gemmtune::planned_join", _empty, lib=LIBRARY)
