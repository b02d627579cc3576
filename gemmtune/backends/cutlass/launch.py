"""Launch of a compiled operation: a struct filled once, and one C call with the parameters that vary."""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...choice import Kernel, Run, Scalars, Tensors
from ...errors import ErrorFromChoice
from ...problem import Problem
from ...toolchain.driver import find_driver
from ...toolchain.launcher import Workspace, memory_of, shared_workspace
from ...toolchain.orientation import Oriented
from ...toolchain.prepared import DeviceFunction
from ...toolchain.render import template
from ...toolchain.structs import MOST_OPERANDS, Strides, declared, fields_of, strides_of
from .configs import Config
from .operation import bytes_of
from .variants import DECOMPOSITIONS

GIVEN = "5P2d"
"""Format of ``struct Given`` in launch.h.jinja before x: stream, out, a, b, workspace; alpha, beta."""
WRITTEN = {"out": "void*", "workspace": "void*"}
"""Pointers that a kernel writes through."""


class Launch(ctypes.Structure):
    """Launch parameters: addresses and scalars of each call, strides, sizes, launch variant, and ``batch`` products."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("out", ctypes.c_void_p), ("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("x", ctypes.c_void_p * MOST_OPERANDS),
        ("workspace", ctypes.c_void_p), ("alpha", ctypes.c_double), ("beta", ctypes.c_double),
        ("out_strides", Strides), ("a_strides", Strides), ("b_strides", Strides), ("x_strides", Strides * MOST_OPERANDS),
        ("m", ctypes.c_int), ("n", ctypes.c_int), ("k", ctypes.c_int), ("batch", ctypes.c_int),
        ("raster", ctypes.c_int), ("swizzle", ctypes.c_int), ("decomposition", ctypes.c_int), ("splits", ctypes.c_int),
        ("device", ctypes.c_int), ("multiprocessors", ctypes.c_int),
    )  # fmt: skip


@functools.cache
def launch_text(passed: int) -> str:
    """Return C++ text: ``struct Launch``, ``gemmtune_call`` for ``passed`` operands in addition to a and b, and ``prepared``."""
    return template(__package__, "launch.h.jinja").render(
        fields=[declared(name, kind, WRITTEN) for name, kind in fields_of(Launch)],
        size=ctypes.sizeof(Launch),
        used=Launch.multiprocessors.offset + Launch.multiprocessors.size,
        passed=passed,
    )


class Library:
    """Functions of a loaded shared object. Raises OSError if the file is not one.

    ``check`` tests if the operation serves a launch. ``launch`` launches with the addresses in a Launch, ``call`` with those in a
    ``Given``.
    """

    def __init__(self, path: Path) -> None:
        functions = ctypes.CDLL(str(path))
        self.capture, self.workspace_bytes = functions.gemmtune_capture, functions.gemmtune_workspace_bytes
        self.capture.argtypes, self.capture.restype = [ctypes.c_void_p], ctypes.c_ulonglong
        self.workspace_bytes.argtypes, self.workspace_bytes.restype = [ctypes.c_void_p], ctypes.c_longlong
        self.check, self.launch, self.call = functions.gemmtune_check, functions.gemmtune_launch, functions.gemmtune_call
        self.check.argtypes, self.launch.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_void_p]
        self.call.argtypes = [ctypes.c_void_p, ctypes.c_char_p]  # address of a Launch, bytes of a Given
        self.threads, self.shared_bytes = int(functions.gemmtune_threads()), int(functions.gemmtune_shared_bytes())


@functools.lru_cache(maxsize=512)
def load(path: Path) -> Library:
    return Library(path)


STATUSES = {
    1: "misaligned operand", 2: "invalid data type", 3: "invalid layout", 4: "invalid problem", 5: "not supported",
    6: "workspace is null", 7: "internal error", 8: "architecture mismatch", 9: "insufficient driver", 10: "out of memory",
    11: "cannot implement it",
}  # fmt: skip
"""Names of cutlass::Status by number, from ``cutlass/cutlass.h``."""


def bind(library: Library, config: Config, problem: Problem, oriented: Oriented, name: str) -> Kernel:
    """Return the kernel for the current device. Raises ErrorFromChoice with CUTLASS's status if the operation refuses."""

    def refuse(reason: str) -> ErrorFromChoice:
        return ErrorFromChoice(name, str(problem), reason)

    device, operation = torch.cuda.current_device(), config.operation
    planned = _planned(config, problem, oriented, device)
    status = library.check(ctypes.addressof(planned))
    if status:
        raise refuse(_said(status))
    workspace = shared_workspace(library.capture, int(library.workspace_bytes(ctypes.addressof(planned))), device, library)
    launch = DeviceFunction(
        function=ctypes.cast(library.call, ctypes.c_void_p).value or 0,
        plan=ctypes.addressof(planned),
        left=int(oriented.swap_ab),
        right=int(not oriented.swap_ab),
        first=3 if problem.inp is not None and problem.inp_read is None else 2,
        count=len(oriented.added),
        alignment=(
            bytes_of(operation.d, operation.alignment_d),
            bytes_of(operation.a, operation.alignment_a),
            bytes_of(operation.b, operation.alignment_b),
        ),
        need=ctypes.cast(library.workspace_bytes, ctypes.c_void_p).value or 0,
        plan_bytes=ctypes.sizeof(planned),
        owner=(library, planned),
        memory=memory_of(workspace, find_driver()) if workspace.size_bytes else None,
    )
    return Kernel(run=_launcher(library, planned, launch, workspace, refuse), prepared=launch)


def _launcher(
    library: Library, planned: Launch, launch: DeviceFunction, workspace: Workspace, refuse: Callable[[str], ErrorFromChoice]
) -> Run:
    """Return a function with the signature of ``choice.Run`` that launches on the device's current stream."""
    call, what, device = library.call, ctypes.byref(planned), workspace.device
    current_stream, needs_workspace = torch._C._cuda_getCurrentRawStream, workspace.size_bytes > 0
    left_place, right_place, first, without = launch.left, launch.right, launch.first, (1.0, 0.0)
    out_bytes, left_bytes, right_bytes = launch.alignment
    # One block of bytes costs the host less than separate arguments of a C function.
    packed = struct.Struct(f"{GIVEN}{launch.count}P").pack

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        left, right = tensors[left_place].data_ptr(), tensors[right_place].data_ptr()
        to, x = out.data_ptr(), [tensor.data_ptr() for tensor in tensors[first:]]
        if to % out_bytes or left % left_bytes or right % right_bytes:
            addresses = " ".join(f"{address:#x}" for address in (to, left, right, *x))
            raise refuse(f"an operand is not aligned as planned: {addresses}")
        stream = current_stream(device)
        memory = workspace.address(stream) if needs_workspace else 0
        status = call(what, packed(stream, to, left, right, memory, *(scalars or without), *x))
        if status:
            raise refuse(_said(status))

    return run


def _said(status: int) -> str:
    return f"CUTLASS: {STATUSES.get(status, f'status {status}')}"


def _planned(config: Config, problem: Problem, oriented: Oriented, device: int) -> Launch:
    """Return the parameters that calls share: all except addresses and scalars."""
    words = Launch()
    words.m, words.n, words.k = oriented.sizes
    words.batch = problem.batch
    words.alpha = 1.0
    words.out_strides, words.a_strides, words.b_strides = map(strides_of, (oriented.out, oriented.a, oriented.b))
    for i, layout in enumerate(oriented.added):
        words.x_strides[i] = strides_of(layout)
    variant = config.variant
    words.raster, words.swizzle = "mn".index(variant.raster), variant.swizzle
    words.decomposition, words.splits = DECOMPOSITIONS.index(variant.decomposition), variant.splits
    words.device = device
    words.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return words
