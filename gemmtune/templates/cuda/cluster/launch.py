"""Launching a compiled kernel: a struct that is filled once, and one call of a C function with the addresses."""

from __future__ import annotations

import ctypes
import struct

import torch

from ....choice import Run
from ....errors import ErrorFromChoice
from ....problem import Layout, Problem
from ...strides import Strides
from ...workspace import Workspace
from ..library import Library, require
from .configs import Config
from .legality import operands_of
from .source import MOST_OPERANDS

__all__ = ["Launch", "bind", "launch_of"]

ALIGNED_BYTES = 16
GIVEN = "5P2d"
"""``struct Given`` of arguments.h.jinja, before the operands of the epilogue: stream, out, p, q, workspace; alpha, beta."""


class Launch(ctypes.Structure):
    """``struct Launch`` of arguments.h.jinja, field by field."""

    _fields_ = [
        ("out", ctypes.c_void_p), ("p", ctypes.c_void_p), ("q", ctypes.c_void_p), ("x", ctypes.c_void_p * MOST_OPERANDS),
        ("workspace", ctypes.c_void_p),
        ("out_strides", Strides), ("p_strides", Strides), ("q_strides", Strides), ("x_strides", Strides * MOST_OPERANDS),
        ("alpha", ctypes.c_double), ("beta", ctypes.c_double),
        ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("k", ctypes.c_int), ("batch", ctypes.c_int),
        ("groups", ctypes.c_int), ("dealt", ctypes.c_int), ("ahead", ctypes.c_int), ("overlaps", ctypes.c_int),
        ("device", ctypes.c_int),
    ]  # fmt: skip


def bind(library: Library, config: Config, problem: Problem, name: str) -> Run:
    """A function with the signature of ``choice.Run`` for the current device.

    Raises:
        ErrorFromChoice: the kernel cannot be made ready on the device.
    """
    device = torch.cuda.current_device()
    planned = launch_of(config, problem, device)
    require(library.prepare(device), name, problem)
    workspace = Workspace(library.capture, int(library.workspace_bytes(ctypes.addressof(planned))), device)
    call, what, swapped = library.call, ctypes.byref(planned), config.swapped
    current_stream, needs_workspace = torch._C._cuda_getCurrentRawStream, workspace.size_bytes > 0
    added = problem.inp_read is not None
    count = added + (len(problem.epilogue.operands) if problem.epilogue else 0)
    # One block of bytes costs the host less than as many arguments of a C function.
    packed = struct.Struct(f"{GIVEN}{count}P").pack

    def run(
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        inp: torch.Tensor | None,
        alpha: float,
        beta: float,
        extra: tuple[torch.Tensor, ...],
    ) -> None:
        first, second = (b, a) if swapped else (a, b)
        p, q = first.data_ptr(), second.data_ptr()
        if p % ALIGNED_BYTES or q % ALIGNED_BYTES:
            raise ErrorFromChoice(name, str(problem), f"an operand is not aligned as planned: {p:#x} {q:#x}")
        stream = current_stream(device)
        memory = workspace.address(stream) if needs_workspace else 0
        x = [tensor.data_ptr() for tensor in ((inp, *extra) if added else extra)]  # type: ignore[union-attr]
        status = call(what, packed(stream, out.data_ptr(), p, q, memory, alpha, beta, *x))
        if status:
            require(status, name, problem)

    return run


def launch_of(config: Config, problem: Problem, device: int) -> Launch:
    """All but the addresses and the scalars."""
    p, q, oriented = operands_of(problem, swapped=config.swapped)
    words = Launch()
    words.rows, words.cols, words.k, words.batch = p.size[-2], q.size[-2], problem.k, problem.batch
    words.out_strides, words.p_strides, words.q_strides = _strides(oriented.out), _strides(p), _strides(q)
    for i, layout in enumerate(oriented.added):
        words.x_strides[i] = _strides(layout)
    words.groups, words.dealt = config.groups, int(config.dealt)
    words.ahead, words.overlaps = config.ahead, int(config.pdl)
    words.device = device
    return words


def _strides(layout: Layout) -> Strides:
    """In elements; of a batch of one, none from one product to the next."""
    batch = layout.stride[0] if len(layout.stride) == 3 and layout.size[0] > 1 else 0
    return Strides(*layout.stride[-2:], batch)
