"""What a launch of a kernel for mixed_mm is told of a problem, but for how its tiles are copied and stored."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

from ....problem import Layout, Problem
from ....toolchain.record import A, B, TensorMap, operand_at
from .. import parameters
from ..hopper import TMA_BYTES
from ..parameters import fill_common
from .config import MixedConfig
from .legality import is_along_k
from .weights import weights_of

__all__ = ["PROMOTION_BYTES", "Work", "alignment_of", "fill_mixed", "maps_along_k", "pitch_bytes"]

PROMOTION_BYTES = 256
"""What L2 asks of memory for a line that it misses."""


class Work(parameters.Work):
    """Sizes, and the division of K among blocks."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("steps", ctypes.c_int), ("cluster_k", ctypes.c_int),
        ("prefetch_stages", ctypes.c_int), ("interleaved_k", ctypes.c_int),
    )  # fmt: skip


def fill_mixed(work: Work, problem: Problem, config: MixedConfig, block_k: int) -> int:
    """All but addresses. Returns how many operands are read beside a and b."""
    operands = [_matrix(x) for x in problem.scales]
    operands += [x.expanded(problem.out.size) for x in (problem.epilogue.operands if problem.epilogue else ())]
    fill_common(work, problem.out, operands)
    work.rows, work.cols, work.steps = problem.m, problem.n, -(-problem.k // block_k)
    work.cluster_k, work.interleaved_k, work.prefetch_stages = config.cluster_k, config.interleaved_k, config.prefetch_stages
    return len(operands)


def maps_along_k(problem: Problem, block_n: int, block_k: int) -> list[TensorMap]:
    """The scales and zero points that change along K: a box has those of a stage, a row for each group of it."""
    maps = []
    for i, (factor, layout) in enumerate(zip(weights_of(problem).factors.values(), problem.scales, strict=True)):
        if factor.group:
            maps.append(
                TensorMap(
                    operand=operand_at(i),
                    dtype=factor.dtype,
                    sizes=(problem.n, -(-problem.k // factor.group)),
                    pitches=(_matrix(layout).stride[0] * factor.dtype.itemsize,),
                    box=(block_n, max(block_k // factor.group, 1)),
                    promotion_bytes=PROMOTION_BYTES,
                )
            )
    return maps


def alignment_of(problem: Problem) -> tuple[tuple[int, int], ...]:
    """What the addresses of the operands that TMA copies are multiples of."""
    copied = [operand_at(i) for i, along_k in enumerate(is_along_k(problem)) if along_k]
    return tuple((operand, TMA_BYTES) for operand in (A, B, *copied))


def pitch_bytes(layout: Layout) -> int:
    """Bytes from one line to the next; of a single one, as if there were more."""
    stride = layout.stride[0] if layout.size[0] > 1 else -(-layout.size[1] // TMA_BYTES) * TMA_BYTES
    return stride * layout.dtype.itemsize


def _matrix(layout: Layout) -> Layout:
    """Scales as a matrix: a single number, or one row, for all."""
    size = (1,) * (2 - len(layout.size)) + layout.size
    stride = (0,) * (2 - len(layout.stride)) + layout.stride if layout.numel != 1 else (0, 0)
    return Layout(size=size, stride=stride, dtype=layout.dtype, offset=layout.offset)
