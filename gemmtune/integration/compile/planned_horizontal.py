"""One product that replaces several of the same input: a function that writes into ``out``, and an operator of torch.

The weights are adjacent in memory when the graph is compiled. Each call compares their addresses. If the model was copied or moved
since, so that they are no longer adjacent, each weight is multiplied separately into its columns of ``out``.
"""

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ...dispatch.plan import Plan
from ...problem import Layout, Problem
from ...problem.layout import ALIGNED_BYTES
from .planned import LIBRARY, problem_of_text, ready_launch, ready_plan, run_as_laid_out, run_planned

Tensor = torch.Tensor

LIBRARY.define("planned_join(Tensor[] tensors, str problem, int[] widths) -> Tensor")  # type: ignore[no-untyped-call]
OPERATOR = torch.ops.gemmtune.planned_join.default
"""Operator of a horizontal fusion. ``tensors`` are a, then the pieces of each further operand. ``widths`` are their columns."""
SCALES = ("scale_b", "zero_b")
_CAPACITY = 4096
_wholes: dict[Hashable, Tensor] = {}
"""Tensors over the memory of adjacent pieces, which they do not keep alive. Each call compares the pieces' addresses first."""


def ready_horizontal(problem: Problem, widths: Sequence[int], index: int) -> Plan:
    """Make the plans of the whole product and of its parts before any capture, and return the plan of the whole."""
    ready_pieces(problem.key, widths, index)
    return ready_plan(problem, index)


def ready_pieces(problem: str, widths: Sequence[int], index: int) -> None:
    """Make the launches of the separate products."""
    for part in _parts(problem, tuple(widths)):
        ready_launch(part, index)


def run_horizontal(*tensors: Tensor, out: Tensor, problem: str, widths: Sequence[int]) -> None:
    """Write the products of a with all pieces into ``out``."""
    a, count = tensors[0], len(widths)
    roles = [tensors[begin : begin + count] for begin in range(1, len(tensors), count)]
    gathered = _gathered(problem)
    wholes = [None if gather else _whole(pieces) for pieces, gather in zip(roles, gathered, strict=True)]
    if all(gather or whole is not None for gather, whole in zip(gathered, wholes, strict=True)):
        operands = [torch.cat(pieces, -1) if whole is None else whole for pieces, whole in zip(roles, wholes, strict=True)]
        run_planned(a, *operands, out=out, problem=problem)
        return
    parts = _parts(problem, tuple(widths))
    for part, columns, *pieces in zip(parts, torch.split(out, list(widths), 1), *roles, strict=True):
        run = run_planned if _fits(part, pieces) else run_as_laid_out
        run(a, *pieces, out=columns, problem=part)


@functools.lru_cache(_CAPACITY)
def gathered_roles(problem: Problem) -> tuple[str, ...]:
    """Return the operands whose pieces each call concatenates: scales and zero points of groups along K.

    Each weight stores them row by row, so that the columns of several weights are not adjacent in memory.
    """
    return tuple(role for role, layout in problem.operands if role in SCALES and len(layout.size) == 2 and layout.size[0] > 1)


@functools.lru_cache(_CAPACITY)
def _gathered(problem: str) -> tuple[bool, ...]:
    """Return for each operand except a True if each call concatenates its pieces."""
    known = problem_of_text(problem)
    gathered = gathered_roles(known)
    return tuple(role in gathered for role, _ in known.operands if role != "a")


@functools.lru_cache(_CAPACITY)
def _parts(problem: str, widths: tuple[int, ...]) -> tuple[str, ...]:
    """Return the keys of the separate products, each into its columns of the whole result."""
    ends = itertools.accumulate(widths)
    whole = problem_of_text(problem)
    return tuple(_part_of(whole, end - width, end).key for width, end in zip(widths, ends, strict=True))


def _part_of(problem: Problem, begin: int, end: int) -> Problem:
    """Return the Problem of columns ``begin`` to ``end``, whose result is these columns of the whole result."""
    gathered = gathered_roles(problem)

    def columns(role: str, whole: Layout) -> Layout:
        size = (*whole.size[:-1], end - begin)
        if role in gathered:
            return Layout.contiguous(size, whole.dtype)
        offset = (whole.offset + begin * whole.stride[-1]) % max(1, ALIGNED_BYTES // whole.dtype.itemsize)
        return dataclasses.replace(whole, size=size, offset=offset)

    wholes = [(role, layout) for role, layout in problem.operands if role != "a"] + [("out", problem.out)]
    fields: dict[str, Any] = {role: columns(role, layout) for role, layout in wholes}
    return dataclasses.replace(problem, **fields)


def _fits(part: str, pieces: Sequence[Tensor]) -> bool:
    """Return True if the operands except a have the strides of the problem."""
    layouts = [layout for role, layout in problem_of_text(part).operands if role != "a"]
    return all(_strides(layout) == _strides(Layout.of(x)) for layout, x in zip(layouts, pieces, strict=True))


def _strides(layout: Layout) -> list[int]:
    return [stride for size, stride in zip(layout.size, layout.stride, strict=True) if size > 1]


def _whole(pieces: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor whose columns the pieces are, or None if they are not adjacent in memory."""
    first = pieces[0]
    stride, address, columns = first.stride(), first.data_ptr(), 0
    step = stride[-1] * first.element_size()
    for x in pieces:
        if x.data_ptr() != address + columns * step or x.stride()[-1] != stride[-1] or (x.shape[0] > 1 and x.stride() != stride):
            return None
        columns += x.shape[-1]
    key = (address, first.dtype, first.shape, stride, columns)
    found = _wholes.get(key)
    if found is None:
        if len(_wholes) >= _CAPACITY:
            _wholes.clear()
        found = _wholes[key] = _over(first, columns)
    return found


def _over(first: Tensor, columns: int) -> Tensor:
    """Return a tensor of ``columns`` columns that begins with the first piece and extends past its storage."""
    size = (*first.shape[:-1], columns)
    span = 1 + sum((n - 1) * s for n, s in zip(size, first.stride(), strict=True))
    storage = torch._C._construct_storage_from_data_pointer(first.data_ptr(), first.device, span * first.element_size())
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=first.dtype, device=first.device).set_(storage, 0, size, first.stride())


def _new(tensors: Sequence[Tensor], problem: str, widths: Sequence[int]) -> Tensor:
    out = _empty(tensors, problem, widths)
    run_horizontal(*tensors, out=out, problem=problem, widths=widths)
    return out


def _empty(tensors: Sequence[Tensor], problem: str, widths: Sequence[int]) -> Tensor:
    return tensors[0].new_empty((tensors[0].shape[0], sum(widths)), dtype=problem_of_text(problem).out.dtype)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("planned_join", _new, _device)  # type: ignore[no-untyped-call]
torch.library.register_fake("gemmtune::planned_join", _empty, lib=LIBRARY)
