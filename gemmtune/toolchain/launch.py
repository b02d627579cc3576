"""Launching a kernel of a shared object: a struct that is filled once, and one call of a C function with what differs."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..choice import Run, Scalars, Tensors
from ..errors import ErrorFromChoice
from ..problem import Layout, Problem
from .render import template
from .shared_object import Library
from .structs import Strides, declared, fields_of
from .workspace import Workspace

__all__ = ["GIVEN", "MOST_OPERANDS", "Launch", "bind", "launch_text", "strides_of"]

MOST_OPERANDS = 8
"""That a launch can pass beside a and b."""
GIVEN = "5P2d"
"""``struct Given`` of launch.h.jinja before x: stream, out, a, b, workspace; alpha, beta."""


class Launch(ctypes.Structure):
    """What every kernel is told: addresses and scalars, which a call fills in, and strides. Kernels add sizes and more."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("out", ctypes.c_void_p), ("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("x", ctypes.c_void_p * MOST_OPERANDS),
        ("workspace", ctypes.c_void_p), ("alpha", ctypes.c_double), ("beta", ctypes.c_double),
        ("out_strides", Strides), ("a_strides", Strides), ("b_strides", Strides), ("x_strides", Strides * MOST_OPERANDS),
    )  # fmt: skip


WRITTEN = {"out": "void*", "workspace": "void*"}
"""Addresses to which a kernel stores."""


def launch_text(launch: type[Launch], passed: int) -> str:
    """C++: ``launch`` as ``struct Launch``; ``gemmtune_call``, which is given ``passed`` operands beside a and b; ``prepared``."""
    fields = [declared(name, kind, WRITTEN) for name, kind in fields_of(launch)]
    last = getattr(launch, launch.__dict__["_fields_"][-1][0])
    return template(__package__, "launch.h.jinja").render(
        fields=fields, size=ctypes.sizeof(launch), used=last.offset + last.size, passed=passed
    )


def bind(
    library: Library,
    planned: Launch,
    problem: Problem,
    name: str,
    *,
    refuse: Callable[[int], ErrorFromChoice],
    swap_ab: bool = False,
    aligned_bytes: Sequence[int] = (1, 1, 1),
) -> Run:
    """A function with the signature of ``choice.Run`` for the current device, for which ``library`` has been made ready.

    ``refuse``: the error that a status other than 0 means. ``swap_ab``: the kernel's a is the problem's b. ``aligned_bytes``:
    what the addresses of out, and of the kernel's a and b, are multiples of.
    """
    device = torch.cuda.current_device()
    workspace = Workspace(library.capture, int(library.workspace_bytes(ctypes.addressof(planned))), device)
    call, what = library.call, ctypes.byref(planned)
    current_stream, needs_workspace = torch._C._cuda_getCurrentRawStream, workspace.size_bytes > 0
    out_bytes, a_bytes, b_bytes = aligned_bytes
    first = 3 if problem.inp is not None and problem.inp_read is None else 2
    without = (1.0, 0.0)
    # One block of bytes costs the host less than as many arguments of a C function.
    packed = struct.Struct(f"{GIVEN}{_passed(problem)}P").pack

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        left, right = tensors[0].data_ptr(), tensors[1].data_ptr()
        if swap_ab:
            left, right = right, left
        to, x = out.data_ptr(), [tensor.data_ptr() for tensor in tensors[first:]]
        if to % out_bytes or left % a_bytes or right % b_bytes:
            addresses = " ".join(f"{address:#x}" for address in (to, left, right, *x))
            raise ErrorFromChoice(name, str(problem), f"an operand is not aligned as planned: {addresses}")
        stream = current_stream(device)
        memory = workspace.address(stream) if needs_workspace else 0
        status = call(what, packed(stream, to, left, right, memory, *(scalars or without), *x))
        if status:
            raise refuse(status)

    return run


def _passed(problem: Problem) -> int:
    """How many operands a call gives beside a and b."""
    epilogue = problem.epilogue
    return (problem.inp_read is not None) + len(problem.scales) + (len(epilogue.operands) if epilogue else 0)


def strides_of(layout: Layout) -> Strides:
    """Strides of a matrix, or of a batch of them; of a batch of one, none from one product to the next."""
    batch = layout.stride[0] if len(layout.stride) == 3 and layout.size[0] > 1 else 0
    return Strides(*layout.stride[-2:], batch)
