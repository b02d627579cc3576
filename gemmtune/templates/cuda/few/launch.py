"""Launching a compiled kernel: a struct that is filled once, and one call of a C function with the addresses."""

from __future__ import annotations

import ctypes
import struct

import torch

from ....choice import Run
from ....errors import ErrorFromChoice
from ....problem import Layout, Problem
from ...strides import Strides
from ..library import Library, require
from .configs import Config
from .legality import is_along_k
from .source import MOST_OPERANDS

__all__ = ["Launch", "bind", "launch_of"]

ALIGNED_BYTES = 16
GIVEN = "4P"
"""``struct Given`` of arguments.h.jinja, before scales and operands of the epilogue: stream, out, a, b."""


class Launch(ctypes.Structure):
    """``struct Launch`` of arguments.h.jinja, field by field."""

    _fields_ = [
        ("out", ctypes.c_void_p), ("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("x", ctypes.c_void_p * MOST_OPERANDS),
        ("out_strides", Strides), ("x_strides", Strides * MOST_OPERANDS),
        ("a_pitch", ctypes.c_longlong), ("b_pitch", ctypes.c_longlong),
        ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("k", ctypes.c_int),
        ("blocks", ctypes.c_int), ("takes_turns", ctypes.c_int), ("ahead", ctypes.c_int), ("overlaps", ctypes.c_int),
        ("device", ctypes.c_int),
    ]  # fmt: skip


def bind(library: Library, config: Config, problem: Problem, name: str) -> Run:
    """A function with the signature of ``choice.Run`` for the current device.

    Raises:
        ErrorFromChoice: the kernel cannot be made ready on the device.
    """
    device = torch.cuda.current_device()
    words = launch_of(config, problem, device)
    require(library.prepare(device), name, problem)
    call, what, current_stream = library.call, ctypes.byref(words), torch._C._cuda_getCurrentRawStream
    count = len(problem.scales) + (len(problem.epilogue.operands) if problem.epilogue else 0)
    copied = [i for i, along_k in enumerate(is_along_k(problem)) if along_k]
    # One block of bytes costs the host less than as many arguments of a C function.
    packed = struct.Struct(f"{GIVEN}{count}P").pack

    def run(
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        inp: torch.Tensor | None,  # noqa: ARG001 - mixed_mm has none, nor scalars
        alpha: float,  # noqa: ARG001
        beta: float,  # noqa: ARG001
        extra: tuple[torch.Tensor, ...],
    ) -> None:
        p, q = a.data_ptr(), b.data_ptr()
        addresses = [x.data_ptr() for x in extra]
        if (p | q) % ALIGNED_BYTES or any(addresses[i] % ALIGNED_BYTES for i in copied):
            raise ErrorFromChoice(name, str(problem), f"an operand is not aligned as planned: {p:#x} {q:#x} {addresses}")
        status = call(what, packed(current_stream(device), out.data_ptr(), p, q, *addresses))
        if status:
            require(status, name, problem)

    return run


def launch_of(config: Config, problem: Problem, device: int) -> Launch:
    """All but the addresses."""
    words = Launch()
    words.rows, words.cols, words.k = problem.m, problem.n, problem.k
    words.out_strides = _strides(problem.out)
    extra = [_scale(x) for x in problem.scales]
    extra += [x.expanded(problem.out.size) for x in (problem.epilogue.operands if problem.epilogue else ())]
    for i, layout in enumerate(extra):
        words.x_strides[i] = _strides(layout)
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


def _strides(layout: Layout) -> Strides:
    """In elements."""
    return Strides(*layout.stride, 0)
