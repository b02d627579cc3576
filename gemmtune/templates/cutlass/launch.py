"""Launching a compiled operation: a struct that is filled once, and one call of a C function with the addresses."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import torch

from ...choice import Run
from ...errors import ErrorFromChoice
from ...problem import Layout, Problem
from .. import shared_object
from ..orientation import Oriented
from ..strides import Strides
from ..workspace import Workspace
from .axes import DECOMPOSITIONS
from .configs import MOST_OPERANDS, Config
from .operation import ENCODED, bytes_of

__all__ = ["Launch", "Library", "bind"]

STATUSES = {
    1: "misaligned operand", 2: "invalid data type", 3: "invalid layout", 4: "invalid problem", 5: "not supported",
    6: "workspace is null", 7: "internal error", 8: "architecture mismatch", 9: "insufficient driver", 10: "out of memory",
    11: "cannot implement it",
}  # fmt: skip
"""cutlass::Status by number, ``cutlass/cutlass.h``."""


GIVEN = "5P2d"
"""``struct Given`` of calls.h.jinja, before the operands of the epilogue: stream, out, a, b, workspace; alpha, beta."""


class Launch(ctypes.Structure):
    """``struct Launch`` of launch.h.jinja, field by field."""

    _fields_ = [
        ("out", ctypes.c_void_p), ("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("x", ctypes.c_void_p * MOST_OPERANDS),
        ("workspace", ctypes.c_void_p),
        ("out_strides", Strides), ("a_strides", Strides), ("b_strides", Strides), ("x_strides", Strides * MOST_OPERANDS),
        ("alpha", ctypes.c_double), ("beta", ctypes.c_double),
        ("m", ctypes.c_int), ("n", ctypes.c_int), ("k", ctypes.c_int), ("batch", ctypes.c_int),
        ("raster", ctypes.c_int), ("swizzle", ctypes.c_int), ("decomposition", ctypes.c_int), ("splits", ctypes.c_int),
        ("device", ctypes.c_int), ("multiprocessors", ctypes.c_int), ("overlaps", ctypes.c_int), ("group", ctypes.c_int),
    ]  # fmt: skip


class Library(shared_object.Library):
    """Its functions."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        functions = self._functions
        self.check, self.launch, self.call = functions.gemmtune_check, functions.gemmtune_launch, functions.gemmtune_call
        self.check.argtypes = [ctypes.c_void_p]
        self.launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.call.argtypes = [ctypes.c_void_p, ctypes.c_char_p]


def bind(library: Library, config: Config, problem: Problem, oriented: Oriented, name: str) -> Run:
    """A function with the signature of ``choice.Run`` for the current device.

    Raises:
        ErrorFromChoice: the operation refuses the problem, with CUTLASS's status.
    """
    device = torch.cuda.current_device()
    planned = _planned(config, problem, oriented, device)
    _require(library.check(ctypes.addressof(planned)), name, problem)
    workspace = Workspace(library.capture, int(library.workspace_bytes(ctypes.addressof(planned))), device)
    call, what, exchanged = library.call, ctypes.byref(planned), oriented.exchanged
    current_stream, needs_workspace = torch._C._cuda_getCurrentRawStream, workspace.size_bytes > 0
    out_bytes, a_bytes, b_bytes = _alignments(config)
    reads_inp = problem.inp_read is not None
    # One block of bytes costs the host less than as many arguments of a C function.
    packed = struct.Struct(GIVEN + "P" * len(oriented.added)).pack

    def run(
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        inp: torch.Tensor | None,
        alpha: float,
        beta: float,
        extra: tuple[torch.Tensor, ...],
    ) -> None:
        first, second = (b, a) if exchanged else (a, b)
        to, left, right = out.data_ptr(), first.data_ptr(), second.data_ptr()
        if to % out_bytes or left % a_bytes or right % b_bytes:
            raise _misaligned(name, problem, to, left, right)
        stream = current_stream(device)
        memory = workspace.address(stream) if needs_workspace else 0
        added = (inp, *extra) if reads_inp else extra
        x = [tensor.data_ptr() for tensor in added]  # type: ignore[union-attr]
        status = call(what, packed(stream, to, left, right, memory, alpha, beta, *x))
        if status:
            _require(status, name, problem)

    return run


def _misaligned(name: str, problem: Problem, out: int, a: int, b: int) -> ErrorFromChoice:
    return ErrorFromChoice(name, str(problem), f"an operand is not aligned as planned: {out:#x} {a:#x} {b:#x}")


def _planned(config: Config, problem: Problem, oriented: Oriented, device: int) -> Launch:
    """All but the addresses and the scalars."""
    words = Launch()
    words.m, words.n, words.k = oriented.sizes
    words.batch = problem.batch
    words.alpha = 1.0
    words.out_strides, words.b_strides = _strides(oriented.out), _strides(oriented.b)
    words.a_strides = _strides(oriented.a, in_a_byte=2 if config.operation.a in ENCODED else 1)
    for i, layout in enumerate(oriented.added):
        words.x_strides[i] = _strides(layout)
    axes = config.axes
    words.raster, words.swizzle = "mn".index(axes.raster), axes.swizzle
    words.decomposition, words.splits = DECOMPOSITIONS.index(axes.decomposition), axes.splits
    words.device = device
    words.overlaps = int(config.operation.overlaps)
    words.group = problem.scale_block("scale_b")[0] if config.operation.weights else 0
    words.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return words


def _strides(layout: Layout, in_a_byte: int = 1) -> Strides:
    """In elements, ``in_a_byte`` of which are one of the layout's, as neighbours in a row."""
    batch = layout.stride[0] if len(layout.stride) == 3 else 0
    row, col = layout.stride[-2:]
    return Strides(row * in_a_byte, col, batch)


def _alignments(config: Config) -> tuple[int, int, int]:
    """Of out, a and b, in bytes."""
    operation = config.operation
    elements = ((operation.d, operation.alignment_d), (operation.a, operation.alignment_a), (operation.b, operation.alignment_b))
    out, a, b = (bytes_of(element, count) for element, count in elements)
    return out, a, b


def _require(status: int, name: str, problem: Problem) -> None:
    if status:
        raise ErrorFromChoice(name, str(problem), f"CUTLASS: {STATUSES.get(status, f'status {status}')}")
