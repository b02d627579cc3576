"""What the kernel is told of a problem."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

from ....problem import Problem
from ....toolchain import launch
from ....toolchain.launch import strides_of
from .configs import Config
from .legality import operands_of

__all__ = ["Launch", "launch_of"]


class Launch(launch.Launch):
    """Sizes and strides are those of the product as the kernel sees it: a[rows, K] @ b[cols, K]^T."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("k", ctypes.c_int), ("batch", ctypes.c_int),
        ("groups", ctypes.c_int), ("dealt", ctypes.c_int), ("ahead", ctypes.c_int), ("overlaps", ctypes.c_int),
        ("device", ctypes.c_int),
    )  # fmt: skip


def launch_of(config: Config, problem: Problem, device: int) -> Launch:
    """All but the addresses and the scalars."""
    p, q, oriented = operands_of(problem, swapped=config.swapped)
    words = Launch()
    words.rows, words.cols, words.k, words.batch = p.size[-2], q.size[-2], problem.k, problem.batch
    words.out_strides, words.a_strides, words.b_strides = strides_of(oriented.out), strides_of(p), strides_of(q)
    for i, layout in enumerate(oriented.added):
        words.x_strides[i] = strides_of(layout)
    words.groups, words.dealt = config.groups, int(config.dealt)
    words.ahead, words.overlaps = config.ahead, int(config.pdl)
    words.device = device
    return words
