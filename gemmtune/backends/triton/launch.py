"""Launch of a compiled kernel with minimal host work in Python.

A ``Record`` holds everything that is constant between calls. Pointers are passed as integers, some as tensor descriptors.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...choice import Kernel, Run, Scalars, Tensors
from ...problem.dtypes import FLOAT8
from ...toolchain.driver import find_driver
from ...toolchain.prepared import DriverLaunch, Memory
from ...toolchain.triton_kernels import toolchain
from .descriptors import describe, encoded_bytes, encoder
from .records import Record, launch_record, operand_number
from .workspace import Acquire

PLAIN = ((1, None), (2, None), (0, None))
"""Operands a, b and out, as in a product without bias, scales, epilogue operands or splits."""
FLAT_VERSIONS = ((3, 6),)
"""Triton versions whose C launcher takes the kernel's arguments one by one, after its own."""
PACKED_VERSIONS = ((3, 7), (3, 8), (3, 9))
"""Triton versions whose C launcher takes the kernel's arguments as one tuple, after a description of their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Function to call as ``function(*grid, stream, *middle, *arguments)``; with ``packed`` the arguments are one tuple."""

    function: Callable[..., None]
    grid: tuple[int, int, int]
    middle: tuple[Any, ...]
    packed: bool


def launcher_of(compiled: Any, grid: tuple[int, int, int], *, pdl: bool = False) -> Launcher:
    """Return the cheapest way to launch.

    This is the C function below Triton's launcher object if the version's argument order is known. It does not call launch hooks
    (of a profiler). Kernels that need scratch memory go through Triton's launcher, which allocates it. With ``pdl`` the launch may
    overlap the end of the previous kernel, and this kernel must wait for it. Triton's launcher object does not get ``pdl`` and
    launches in order.
    """
    launcher = compiled.run
    handle, metadata = compiled.function, compiled.packed_metadata
    needs_scratch = getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 1)
    version = tuple(int(part) for part in toolchain().__version__.split(".")[:2])
    unknown = torch.version.hip is not None or version not in (*FLAT_VERSIONS, *PACKED_VERSIONS)
    if unknown or needs_scratch or getattr(launcher, "gsan_enabled", False):
        return Launcher(function=launcher, grid=grid, middle=(handle, metadata, None, None, None), packed=False)
    flags = (launcher.launch_cooperative_grid, pdl)
    if version in FLAT_VERSIONS:
        middle = (handle, *flags, None, None, metadata, None, None, None)
        return Launcher(function=launcher.launch, grid=grid, middle=middle, packed=False)
    typed = (handle, *flags, metadata, None, None, None, None, None, launcher.arg_annotations, launcher.kernel_signature)
    return Launcher(function=launcher.launch, grid=grid, middle=typed, packed=True)


def takes_encoded(compiled: Any, call: Launcher) -> Launcher | None:
    """Return ``call`` with the lower function that takes encoded descriptors, or None if the version is unknown.

    Triton 3.6 has one function per signature, inside a closure; 3.7 to 3.9 have one for all kernels.
    """
    if call.function is compiled.run:
        return None
    if call.packed:
        function = importlib.import_module("triton").runtime.driver.active.utils.launch
    elif inspect.isfunction(call.function):
        function = inspect.getclosurevars(call.function).nonlocals.get("launcher")
    else:
        function = None
    if function is None or not inspect.isbuiltin(function):
        return None
    return replace(call, function=function)


def bind(loaded: Any, record: Record, *, interpret: bool) -> Kernel:
    """Bind to the current GPU, which stays the current device, or with ``interpret`` to Triton's interpreter on the CPU."""
    if interpret:
        return Kernel(run=_interpreted(loaded, record))
    device = torch.cuda.current_device()
    acquire = record.buffers.on(device, loaded) if record.buffers is not None else None
    return Kernel(run=_compiled(loaded, record, device, acquire), prepared=prepared(loaded, record, acquire))


def _compiled(loaded: Any, record: Record, device: int, acquire: Acquire | None) -> Run:
    described = any(description is not None for _, description in record.operands)
    launcher = launcher_of(loaded, record.grid, pdl=record.pdl)
    call = takes_encoded(loaded, launcher) if described else launcher
    if call is None:
        # Triton's own launcher builds the descriptors for an unknown version, and launches in order.
        middle = (loaded.function, loaded.packed_metadata, None, None, None)

        def launch(stream: int, *values: Any) -> None:
            loaded.run(*record.grid, stream, *middle, *values)

        return _by_triton(launch, lambda: torch.cuda.current_stream(device).cuda_stream, record, acquire)
    if record.operands == PLAIN and not record.scalars:
        return _bind_plain(call, device, record.constants)
    metas = iter(loaded.metadata.tensordesc_meta if described else ())
    encode = [encoder(description, next(metas)) if description is not None else None for _, description in record.operands]
    return _bind_general(call, device, record, encode, acquire)


def prepared(loaded: Any, record: Record, acquire: Acquire | None) -> DriverLaunch | None:
    """Return the launch as plain data for the current device. None: Triton's launcher does more, or may do more.

    The parameters are the kernel's arguments, then the addresses of two memories that Triton may use, null here.
    """
    if not torch.cuda.is_available() or launcher_of(loaded, record.grid).function is loaded.run:
        return None
    metas = _metas(loaded, record)
    if loaded.run.launch_cooperative_grid or loaded.metadata.num_ctas != 1 or None in metas:
        return None
    driver, buffers, memory = find_driver(), record.buffers, None
    if buffers is not None and acquire is not None:
        memory = Memory(tensors=acquire, capture=driver.capture_info, size_bytes=buffers.size_bytes)
    described = [(place, how) for place, how in record.operands if how is not None]
    encoders = [encoder(how, meta) for (_, how), meta in zip(described, metas, strict=True)]
    return DriverLaunch(
        record=launch_record(record, loaded.metadata),
        launch=driver.address("cuLaunchKernelEx"),
        set_context=driver.address("cuCtxSetCurrent"),
        function=int(loaded.function),
        context=driver.context(torch.cuda.current_device()),
        skipped=None,
        owner=(loaded, driver),
        memory=memory,
        maps=tuple(operand_number(place) for place, _ in described),
        encode=lambda number, address: encoded_bytes(encoders[number](address)[0]),
    )


def _metas(loaded: Any, record: Record) -> list[Any]:
    """Return Triton's metadata of each descriptor operand. None stands for a kernel that takes the descriptor's numbers instead."""
    count = sum(how is not None for _, how in record.operands)
    return list(loaded.metadata.tensordesc_meta or [None] * count) if count else []


def _interpreted(function: Any, record: Record) -> Run:
    """Return a ``Run`` in the interpreter. It reads 8-bit floats as bytes, and words from the first column."""

    def readable(index: int, value: Any) -> Any:
        if isinstance(getattr(value, "base", None), Tensor):  # a tensor descriptor
            return replace(value, base=value.base.view(torch.uint8)) if value.base.dtype in FLOAT8 else value
        if not isinstance(value, Tensor) or value.dtype.itemsize > 1:
            return value
        if index in record.words:
            return value.as_strided((value.shape[-2],), (1,)).view(torch.int32)
        return value.view(torch.uint8) if value.dtype in FLOAT8 else value

    def launch(_stream: int, *values: Any) -> None:
        function[record.grid](*(readable(index, value) for index, value in enumerate(values)))

    def acquire(_stream: int) -> Sequence[Tensor]:
        assert record.buffers is not None
        return record.buffers.interpreted()

    return _by_triton(launch, lambda: 0, record, acquire if record.buffers is not None else None)


def _by_triton(launch: Callable[..., None], stream_of: Callable[[], int], record: Record, acquire: Acquire | None) -> Run:
    """Return a ``Run`` that passes tensors and Triton's own descriptors."""

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        stream = stream_of()
        given = (out, *tensors, *(acquire(stream) if acquire is not None else ()))
        operands = [given[place] if how is None else describe(given[place], how) for place, how in record.operands]
        launch(stream, *operands, *(float(scalars[place]) for place in record.scalars), *record.constants)

    return run


def _bind_plain(call: Launcher, device: int, tail: tuple[int, ...]) -> Run:
    function, (x, y, z), middle, packed = call.function, call.grid, call.middle, call.packed
    stream_of = torch._C._cuda_getCurrentRawStream

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:  # noqa: ARG001
        # If beta is 0, an unread inp follows a and b.
        values = (tensors[0].data_ptr(), tensors[1].data_ptr(), out.data_ptr(), *tail)
        if packed:
            function(x, y, z, stream_of(device), *middle, values)
        else:
            function(x, y, z, stream_of(device), *middle, *values)

    return run


def _bind_general(
    call: Launcher, device: int, record: Record, encode: Sequence[Callable[[int], Sequence[Any]] | None], acquire: Acquire | None
) -> Run:
    """Bind a launch of any form. ``encode`` makes the arguments of the descriptor operands."""
    function, (x, y, z), middle, packed = call.function, call.grid, call.middle, call.packed
    stream_of = torch._C._cuda_getCurrentRawStream
    operands = [(place, encoded) for (place, _), encoded in zip(record.operands, encode, strict=True)]
    passed, tail = record.scalars, record.constants

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        stream = stream_of(device)
        # Buffers are held until the launch, not until the kernel ends: torch's allocator reuses memory in stream order.
        given = (out, *tensors) if acquire is None else (out, *tensors, *acquire(stream))
        values: list[Any] = []
        for place, encoded in operands:
            address = given[place].data_ptr()
            if encoded is None:
                values.append(address)
            else:
                values += encoded(address)
        values += [scalars[place] for place in passed]
        if packed:
            function(x, y, z, stream, *middle, (*values, *tail))
        else:
            function(x, y, z, stream, *middle, *values, *tail)

    return run
