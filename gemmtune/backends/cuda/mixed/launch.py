"""What a kernel is told of a problem."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

from ....problem import Layout, Problem
from ....toolchain import launch
from ....toolchain.launch import strides_of
from .config import MixedConfig

__all__ = ["Launch", "launch_of"]

ALIGNED_BYTES = 16


class Launch(launch.Launch):
    """Pitches are in bytes, from one row of a, or column of b, to the next."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("a_pitch", ctypes.c_longlong), ("b_pitch", ctypes.c_longlong),
        ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("k", ctypes.c_int),
        ("blocks", ctypes.c_int), ("takes_turns", ctypes.c_int), ("ahead", ctypes.c_int), ("overlaps", ctypes.c_int),
        ("device", ctypes.c_int),
    )  # fmt: skip


def launch_of(config: MixedConfig, problem: Problem, device: int) -> Launch:
    """All but the addresses."""
    words = Launch()
    words.rows, words.cols, words.k = problem.m, problem.n, problem.k
    words.out_strides = strides_of(problem.out)
    extra = [_scale(x) for x in problem.scales]
    extra += [x.expanded(problem.out.size) for x in (problem.epilogue.operands if problem.epilogue else ())]
    for i, layout in enumerate(extra):
        words.x_strides[i] = strides_of(layout)
    words.a_pitch, words.b_pitch = _pitch(problem.a), _pitch(problem.b.transposed)
    words.blocks, words.takes_turns = config.blocks, int(config.takes_turns)
    words.ahead, words.overlaps = config.ahead, int(config.pdl)
    words.device = device
    return words


def _scale(layout: Layout) -> Layout:
    """As a matrix; a single number, or one row, for all."""
    size = (1,) * (2 - len(layout.size)) + layout.size
    matrix = Layout(size=size, stride=(0,) * (2 - len(layout.stride)) + layout.stride, dtype=layout.dtype, offset=layout.offset)
    return matrix if layout.numel != 1 else Layout(size=size, stride=(0, 0), dtype=layout.dtype, offset=layout.offset)


def _pitch(layout: Layout) -> int:
    """Bytes from one line to the next; of a single one, as if there were more."""
    stride = layout.stride[0] if layout.size[0] > 1 else -(-layout.size[1] // ALIGNED_BYTES) * ALIGNED_BYTES
    return stride * layout.dtype.itemsize
