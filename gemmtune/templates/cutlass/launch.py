"""Launching a compiled operation: a struct that is filled once, but for the addresses, and one call of a C function."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from ...choice import Run
from ...errors import ErrorFromChoice
from ...problem import Layout, Problem
from .axes import DECOMPOSITIONS
from .configs import MOST_OPERANDS, Config
from .orientation import Oriented

__all__ = ["Launch", "Library", "bind", "load"]

STATUSES = {
    1: "misaligned operand", 2: "invalid data type", 3: "invalid layout", 4: "invalid problem", 5: "not supported",
    6: "workspace is null", 7: "internal error", 8: "architecture mismatch", 9: "insufficient driver", 10: "out of memory",
}  # fmt: skip
"""cutlass::Status by number, ``cutlass/cutlass.h``."""


class Strides(ctypes.Structure):
    """In elements."""

    _fields_ = [("row", ctypes.c_longlong), ("col", ctypes.c_longlong), ("batch", ctypes.c_longlong)]


class Launch(ctypes.Structure):
    """``struct Launch`` of launch.h.jinja, field by field."""

    _fields_ = [
        ("out", ctypes.c_void_p), ("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("x", ctypes.c_void_p * MOST_OPERANDS),
        ("workspace", ctypes.c_void_p),
        ("out_strides", Strides), ("a_strides", Strides), ("b_strides", Strides), ("x_strides", Strides * MOST_OPERANDS),
        ("alpha", ctypes.c_double), ("beta", ctypes.c_double),
        ("m", ctypes.c_int), ("n", ctypes.c_int), ("k", ctypes.c_int), ("batch", ctypes.c_int),
        ("raster", ctypes.c_int), ("swizzle", ctypes.c_int), ("decomposition", ctypes.c_int), ("splits", ctypes.c_int),
        ("device", ctypes.c_int), ("multiprocessors", ctypes.c_int), ("overlaps", ctypes.c_int),
    ]  # fmt: skip


class Library:
    """A loaded shared object. Raises OSError where the file is none."""

    def __init__(self, path: Path) -> None:
        self._library = library = ctypes.CDLL(str(path))
        self.check = library.gemmtune_check
        self.workspace_bytes = library.gemmtune_workspace_bytes
        self.launch = library.gemmtune_launch
        self.check.argtypes = self.workspace_bytes.argtypes = [ctypes.c_void_p]
        self.capture = library.gemmtune_capture
        self.launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.capture.argtypes, self.capture.restype = [ctypes.c_void_p], ctypes.c_ulonglong
        self.workspace_bytes.restype = ctypes.c_longlong

    @property
    def threads(self) -> int:
        """Of a block."""
        return int(self._library.gemmtune_threads())

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return int(self._library.gemmtune_shared_bytes())


@functools.lru_cache(maxsize=512)
def load(path: Path) -> Library:
    """The library at ``path``, loaded once."""
    return Library(path)


def bind(library: Library, config: Config, problem: Problem, oriented: Oriented, name: str) -> Run:
    """A function with the signature of ``choice.Run`` for the current device.

    Raises:
        ErrorFromChoice: the operation refuses the problem, with CUTLASS's status.
    """
    device = torch.cuda.current_device()
    template = _template(config, problem, oriented, device)
    _require(library.check(ctypes.addressof(template)), name, problem)
    workspace = _Workspace(library, int(library.workspace_bytes(ctypes.addressof(template))), device)
    current_stream = torch._C._cuda_getCurrentRawStream
    launch, exchanged = library.launch, oriented.exchanged
    reads_inp = problem.inp is not None and problem.beta != "zero"
    alignments = [(x.dtype.itemsize * a) for x, a in zip((oriented.out, oriented.a, oriented.b), _alignments(config), strict=True)]
    out_bytes, a_bytes, b_bytes = alignments

    def run(
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        inp: torch.Tensor | None,
        alpha: float,
        beta: float,
        extra: tuple[torch.Tensor, ...],
    ) -> None:
        words = Launch.from_buffer_copy(template)
        first, second = (b, a) if exchanged else (a, b)
        words.out, words.a, words.b = out.data_ptr(), first.data_ptr(), second.data_ptr()
        if words.out % out_bytes or words.a % a_bytes or words.b % b_bytes:
            raise ErrorFromChoice(
                name, str(problem), f"an operand is not aligned as planned: {words.out:#x} {words.a:#x} {words.b:#x}"
            )
        words.alpha, words.beta = alpha, beta
        added = (inp, *extra) if reads_inp else extra
        for i, x in enumerate(added):
            words.x[i] = x.data_ptr()  # type: ignore[union-attr]
        stream = current_stream(device)
        words.workspace = workspace.address(stream)
        status = launch(ctypes.addressof(words), stream)
        if status:
            _require(status, name, problem)

    return run


class _Workspace:
    """Memory of one bound kernel, zero to begin with: some for each stream, and other for each capture, from its graph's pool.

    That of a capture is kept until the next one on the same stream: a graph that is replayed zeroes it anew.
    """

    def __init__(self, library: Library, size_bytes: int, device: int) -> None:
        self._capture = library.capture
        self._size_bytes = size_bytes
        self._device = torch.device("cuda", device)
        self._by_stream: dict[int, torch.Tensor] = {}
        self._by_capture: dict[int, tuple[int, torch.Tensor]] = {}

    def address(self, stream: int) -> int:
        if self._size_bytes == 0:
            return 0
        capture = self._capture(stream)
        if capture == 0:
            memory = self._by_stream.get(stream)
            if memory is None:
                memory = self._by_stream[stream] = self._new()
            return memory.data_ptr()
        number, memory = self._by_capture.get(stream, (0, None))
        if memory is None or number != capture:
            memory = self._new()
            self._by_capture[stream] = (capture, memory)
        return memory.data_ptr()

    def _new(self) -> torch.Tensor:
        return torch.zeros(self._size_bytes, dtype=torch.uint8, device=self._device)


def _template(config: Config, problem: Problem, oriented: Oriented, device: int) -> Launch:
    words = Launch()
    words.m, words.n, words.k = oriented.sizes
    words.batch = problem.batch
    for name, layout in (("out_strides", oriented.out), ("a_strides", oriented.a), ("b_strides", oriented.b)):
        setattr(words, name, _strides(layout))
    for i, layout in enumerate(oriented.added):
        words.x_strides[i] = _strides(layout)
    axes = config.axes
    words.raster, words.swizzle = "mn".index(axes.raster), axes.swizzle
    words.decomposition, words.splits = DECOMPOSITIONS.index(axes.decomposition), axes.splits
    words.device = device
    words.overlaps = 1
    words.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return words


def _strides(layout: Layout) -> Strides:
    batch = layout.stride[0] if len(layout.stride) == 3 else 0
    row, col = layout.stride[-2:]
    return Strides(row, col, batch)


def _alignments(config: Config) -> tuple[int, int, int]:
    operation = config.operation
    return operation.alignment_d, operation.alignment_a, operation.alignment_b


def _require(status: int, name: str, problem: Problem) -> None:
    if status:
        raise ErrorFromChoice(name, str(problem), f"CUTLASS: {STATUSES.get(status, f'status {status}')}")
