"""The plan of a call: sizes, strides and blocking as the compiled function reads them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ...problem import Layout, Problem
from .configs import Config

__all__ = ["Plan", "make_plan", "packed_shape", "swaps"]

_BLOCK_BYTES = 16 << 20
"""Packed panels held at the same time, of A and of B each: about half of a usual last-level cache."""
_SUMS_BYTES = 64 << 20
"""Sums that rest between two blocks of K."""
_US_PER_THREAD = 4.0
"""Less work than this is not worth waking a thread for."""
_FLOPS_PER_US = 200e3
_BYTES_PER_US = 20e3
"""What one core does in a microsecond, roughly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``words`` is the struct; with ``swapped`` the function is given b as its first and a as its second operand."""

    words: ctypes.Array[ctypes.c_int64]
    swapped: bool


def swaps(problem: Problem, nr: int) -> bool:
    """Whether outᵀ = bᵀ aᵀ is computed instead: for a result stored by columns, and where N is too narrow for a micro-tile."""
    if problem.prepacked:
        return False
    if problem.out.stride[-1] != 1 and problem.out.stride[-2] == 1 and problem.m > 1:
        return True
    return problem.n < nr and problem.m > 2 * problem.n


def packed_shape(k: int, n: int, nr: int) -> tuple[int, int, int]:
    """The shape of a prepacked operand: panels of ``nr`` columns, each with its K rows one after the other."""
    return (-(-n // nr), k, nr)


def make_plan(problem: Problem, config: Config, nr: int) -> Plan:
    """The plan of ``config`` for the problem. The order of the words is that of ``struct Plan`` in the template."""
    swapped = swaps(problem, nr)
    a, b = (problem.b.transposed, problem.a.transposed) if swapped else (problem.a, problem.b)
    out = problem.out.transposed if swapped else problem.out
    m, n, k = a.size[-2], b.size[-1], problem.k
    itemsize = problem.accumulator.itemsize
    kc = min(config.kc, max(k, 1))
    direct, b_words = _b_words(problem, config, b, nr, swapped)
    rows = _rows(m, config.mr)
    block_n = _block(n, nr, _BLOCK_BYTES // (kc * itemsize))
    sums = _SUMS_BYTES // (block_n * itemsize) if k > kc else m
    block_m = _block(m, rows, min(_BLOCK_BYTES // (kc * itemsize), sums))
    inp = _strides(problem.inp, problem, swapped) if problem.inp is not None else (0, 0, 0)
    words = [
        problem.batch, m, n, k, *_three(a), *b_words, *_three(out), *inp, rows, kc, block_m, block_n,
        config.task_m, config.task_n, int(config.mode == "columns"), direct,
        int(problem.alpha == "zero"), int(problem.beta == "zero"), _threads(problem),
    ]  # fmt: skip
    for layout in problem.epilogue.operands if problem.epilogue else ():
        words += _strides(layout, problem, swapped)
    return Plan(words=(ctypes.c_int64 * len(words))(*words), swapped=swapped)


def _rows(m: int, mr: int) -> int:
    """Rows of a panel: M in as few panels as possible, about equally high."""
    panels = max(1, -(-m // mr))
    return max(1, -(-m // panels))


def _block(size: int, panel: int, most: int) -> int:
    """A multiple of ``panel`` of at most ``most`` (but one panel), with which ``size`` falls into about equal blocks."""
    limit = max(1, most // panel)
    panels = max(1, -(-size // panel))
    blocks = -(-panels // limit)
    return -(-panels // blocks) * panel


def _b_words(problem: Problem, config: Config, b: Layout, nr: int, swapped: bool) -> tuple[int, list[int]]:
    """How many panels are read in place, and where a panel starts: strides of batch, panel, column and k."""
    if problem.prepacked:
        panels, k, _ = packed_shape(problem.k, problem.n, nr)
        return (panels if config.direct else 0), [0, k * nr, 1, nr]
    batch, k_stride, n_stride = _three(b)
    return (b.size[-1] // nr if config.direct and not swapped else 0), [batch, nr * n_stride, n_stride, k_stride]


def _three(layout: Layout) -> tuple[int, int, int]:
    """Strides of batch, row and column; the batch stride of a 2-D layout is 0."""
    batch = layout.stride[0] if len(layout.stride) == 3 else 0
    return (batch, layout.stride[-2], layout.stride[-1])


def _strides(layout: Layout, problem: Problem, swapped: bool) -> tuple[int, int, int]:
    """Of an operand that broadcasts to the result."""
    expanded = layout.expanded(problem.out.size)
    return _three(expanded.transposed if swapped else expanded)


def _threads(problem: Problem) -> int:
    """How many threads are worth their start."""
    work_us = problem.flops / _FLOPS_PER_US + problem.bytes / _BYTES_PER_US
    return max(1, int(work_us / _US_PER_THREAD))
