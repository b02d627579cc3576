"""One product in the place of several: a function that writes into ``out``, and an operator of torch.

The weights lay next to each other when the graph was compiled. A call looks whether they still do; where they do not, because the
model was copied or moved since, each is multiplied by itself into its columns of ``out``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ...dispatch.plan import Plan
from ...problem import Layout, Problem
from ...problem.layout import ALIGNED_BYTES
from .library import LIBRARY
from .planned import problem_of_text, ready_launch, ready_plan, run_planned

Tensor = torch.Tensor

LIBRARY.define("planned_join(Tensor[] tensors, str problem, int[] widths) -> Tensor")  # type: ignore[no-untyped-call]
OPERATOR = torch.ops.gemmtune.planned_join.default
"""``tensors`` are a, then for each further one of ``Problem.operands`` the pieces that it consists of, ``widths`` their columns."""


def ready_join(problem: Problem, widths: Sequence[int], index: int) -> Plan:
    """The plan of the whole, made now like those of its pieces: before any capture."""
    ready_pieces(problem.key, widths, index)
    return ready_plan(problem, index)


def ready_pieces(problem: str, widths: Sequence[int], index: int) -> None:
    """Make the launches of the single products now."""
    for part in _parts(problem, tuple(widths)):
        ready_launch(part, index)


def run_join(*tensors: Tensor, out: Tensor, problem: str, widths: Sequence[int]) -> None:
    """Write the products of a with all pieces into ``out``."""
    a, count = tensors[0], len(widths)
    roles = [tensors[begin : begin + count] for begin in range(1, len(tensors), count)]
    wholes = [_whole(pieces) for pieces in roles]
    if None not in wholes:
        run_planned(a, *wholes, out=out, problem=problem)  # type: ignore[arg-type]
        return
    parts = _parts(problem, tuple(widths))
    for part, columns, *pieces in zip(parts, torch.split(out, list(widths), 1), *roles, strict=True):
        run_planned(a, *pieces, out=columns, problem=part)


@functools.lru_cache(4096)
def _parts(problem: str, widths: tuple[int, ...]) -> tuple[str, ...]:
    """The products of the single pieces, into columns of the whole result."""
    ends = itertools.accumulate(widths)
    whole = problem_of_text(problem)
    return tuple(_part_of(whole, end - width, end).key for width, end in zip(widths, ends, strict=True))


def _part_of(problem: Problem, begin: int, end: int) -> Problem:
    """Return the product of some columns alone, into these columns of the whole result."""

    def columns(whole: Layout) -> Layout:
        offset = (whole.offset + begin * whole.stride[-1]) % max(1, ALIGNED_BYTES // whole.dtype.itemsize)
        return dataclasses.replace(whole, size=(*whole.size[:-1], end - begin), offset=offset)

    wholes = [(role, layout) for role, layout in problem.operands if role != "a"] + [("out", problem.out)]
    fields: dict[str, Any] = {role: columns(layout) for role, layout in wholes}
    return dataclasses.replace(problem, **fields)


def _whole(pieces: Sequence[Tensor]) -> Tensor | None:
    """The tensor of which these are columns; None where they do not follow each other in one piece of memory."""
    first, last = pieces[0], pieces[-1]
    step = first.stride(-1) * first.element_size()
    address, columns = first.data_ptr(), 0
    for x in pieces:
        if x.data_ptr() != address + columns * step:
            return None
        columns += x.shape[-1]
    if first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None
    return first.as_strided((*first.shape[:-1], columns), first.stride())


def _new(tensors: Sequence[Tensor], problem: str, widths: Sequence[int]) -> Tensor:
    out = _empty(tensors, problem, widths)
    run_join(*tensors, out=out, problem=problem, widths=widths)
    return out


def _empty(tensors: Sequence[Tensor], problem: str, widths: Sequence[int]) -> Tensor:
    return tensors[0].new_empty((tensors[0].shape[0], sum(widths)), dtype=problem_of_text(problem).out.dtype)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("planned_join", _new, _device)  # type: ignore[no-untyped-call]
torch.library.register_fake("gemmtune::planned_join", _empty, lib=LIBRARY)
