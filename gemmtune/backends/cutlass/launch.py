"""What a compiled operation is told of a problem, and how its launches are made."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...choice import Run
from ...errors import ErrorFromChoice
from ...problem import Layout, Problem
from ...toolchain import launch, shared_object
from ...toolchain.launch import strides_of
from ...toolchain.orientation import Oriented
from ...toolchain.structs import Strides
from .configs import Config
from .operation import ENCODED, bytes_of
from .variants import DECOMPOSITIONS

__all__ = ["Launch", "Library", "bind"]

STATUSES = {
    1: "misaligned operand", 2: "invalid data type", 3: "invalid layout", 4: "invalid problem", 5: "not supported",
    6: "workspace is null", 7: "internal error", 8: "architecture mismatch", 9: "insufficient driver", 10: "out of memory",
    11: "cannot implement it",
}  # fmt: skip
"""cutlass::Status by number, ``cutlass/cutlass.h``."""


class Launch(launch.Launch):
    """A launch with the sizes of CUTLASS and a launch variant."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("m", ctypes.c_int), ("n", ctypes.c_int), ("k", ctypes.c_int), ("batch", ctypes.c_int),
        ("raster", ctypes.c_int), ("swizzle", ctypes.c_int), ("decomposition", ctypes.c_int), ("splits", ctypes.c_int),
        ("device", ctypes.c_int), ("multiprocessors", ctypes.c_int), ("overlaps", ctypes.c_int), ("group", ctypes.c_int),
    )  # fmt: skip


class Library(shared_object.Library):
    """``check`` says whether the operation serves a launch; ``launch`` is a launch of what has its addresses."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.check, self.launch = self._functions.gemmtune_check, self._functions.gemmtune_launch
        self.check.argtypes = [ctypes.c_void_p]
        self.launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]


def bind(library: Library, config: Config, problem: Problem, oriented: Oriented, name: str) -> Run:
    """A function with the signature of ``choice.Run`` for the current device.

    Raises:
        ErrorFromChoice: the operation refuses the problem, with CUTLASS's status.
    """

    def refuse(status: int) -> ErrorFromChoice:
        return ErrorFromChoice(name, str(problem), f"CUTLASS: {STATUSES.get(status, f'status {status}')}")

    planned = _planned(config, problem, oriented, torch.cuda.current_device())
    status = library.check(ctypes.addressof(planned))
    if status:
        raise refuse(status)
    return launch.bind(library, planned, problem, name, refuse=refuse, swap_ab=oriented.swap_ab, aligned_bytes=_alignments(config))


def _planned(config: Config, problem: Problem, oriented: Oriented, device: int) -> Launch:
    """All but the addresses and the scalars."""
    words = Launch()
    words.m, words.n, words.k = oriented.sizes
    words.batch = problem.batch
    words.alpha = 1.0
    words.out_strides, words.b_strides = strides_of(oriented.out), strides_of(oriented.b)
    words.a_strides = _elements(oriented.a, in_a_byte=2 if config.operation.a in ENCODED else 1)
    for i, layout in enumerate(oriented.added):
        words.x_strides[i] = strides_of(layout)
    variant = config.variant
    words.raster, words.swizzle = "mn".index(variant.raster), variant.swizzle
    words.decomposition, words.splits = DECOMPOSITIONS.index(variant.decomposition), variant.splits
    words.device = device
    words.overlaps = int(config.operation.overlaps)
    words.group = problem.scale_block("scale_b")[0] if config.operation.weights else 0
    words.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return words


def _elements(layout: Layout, in_a_byte: int) -> Strides:
    """Strides of elements, ``in_a_byte`` of which are one of the layout's, as neighbours in a row."""
    strides = strides_of(layout)
    return Strides(strides.row * in_a_byte, strides.col, strides.batch)


def _alignments(config: Config) -> tuple[int, int, int]:
    """The alignments of out, a and b, in bytes."""
    operation = config.operation
    elements = ((operation.d, operation.alignment_d), (operation.a, operation.alignment_a), (operation.b, operation.alignment_b))
    out, a, b = (bytes_of(element, count) for element, count in elements)
    return out, a, b
