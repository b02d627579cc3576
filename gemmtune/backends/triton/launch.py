"""Launching a compiled kernel with as little work on the host as Python allows.

Everything that does not change from call to call is in a ``Record``: grid, sizes, strides. Pointers are given as integers, which
Triton's launcher takes as they are. Some operands may be tensor descriptors, made of their addresses.
"""

from __future__ import annotations

import importlib
import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...choice import Kernel, Run, Scalars, Tensors
from ...problem import Problem
from ...problem.dtypes import FLOAT8
from ...toolchain import record as toolchain_record
from ...toolchain.driver import find_driver
from ...toolchain.prepared import DriverLaunch, Memory
from .classes import Argument, shaped, strides_of
from .configs import Geometry
from .descriptors import Description, describe, encoded_bytes, encoder
from .kernels import toolchain
from .workspace import BUFFERS, Acquire, Buffers

Blocks = Mapping[str, tuple[int, int]]
"""Operands that the kernel has as descriptors, each with the block that is moved at a time."""
PLAIN = ((1, None), (2, None), (0, None))
"""The operands of a product without bias, scales, epilogue operands or splits: a, b and out."""
FLAT_VERSIONS = ((3, 6),)
"""Versions of Triton whose C launcher takes the kernel's arguments one by one, after its own."""
PACKED_VERSIONS = ((3, 7), (3, 8), (3, 9))
"""Versions whose C launcher takes them as one tuple, after a description of their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """``function(*grid, stream, *middle, *arguments)``, or with ``packed`` the arguments as one tuple."""

    function: Callable[..., None]
    grid: tuple[int, int, int]
    middle: tuple[Any, ...]
    packed: bool


def launcher_of(compiled: Any, grid: tuple[int, int, int], *, pdl: bool = False) -> Launcher:
    """The cheapest way to launch: the C function below Triton's launcher object where the version's argument order is known.

    Launch hooks (a profiler's) are not called. Kernels that want scratch memory go through Triton's launcher, which allocates it.
    ``pdl``: the launch may overlap the end of the kernel before it, which this kernel must wait for by itself; Triton's launcher
    object is not told, and launches in order.
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
    """``call`` with the function below Triton's handling of descriptors, which takes them encoded; None where that is not known.

    Triton 3.6 has a function of its own for each signature, below a closure; 3.7 to 3.9 have one for all kernels.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A launch of a kernel for operands of one problem, as plain data. A kernel's arguments are ``operands``, ``scalars`` and
    ``constants``, in this order.

    ``operands`` are places among (out, the tensors of a call, the buffers), with a description where the kernel has a descriptor
    instead of a pointer; ``scalars`` are places among the scalars of a call. ``words`` are the numbers of those operands that a
    kernel reads as words of 32 bits, whatever they hold. Without ``buffers`` the kernel needs nothing beside its operands. With
    ``doubles`` the scalars are of 64 bits.
    """

    grid: tuple[int, int, int]
    pdl: bool
    operands: tuple[tuple[int, Description | None], ...]
    scalars: tuple[int, ...]
    constants: tuple[int, ...]
    words: tuple[int, ...] = ()
    buffers: Buffers | None = None
    doubles: bool = False


def record_of(
    arguments: Sequence[Argument],
    problem: Problem,
    where: Geometry,
    *,
    pdl: bool,
    blocks: Blocks,
    buffers: Buffers,
    behind: Sequence[str] = (),
) -> Record:
    """The launch of a kernel with these arguments for ``problem``, divided as ``where`` says.

    ``behind`` names further tensors that the kernel is given behind those of a call.
    """
    layouts = shaped(problem)
    extra = (f"x{i}" for i in range(len(problem.epilogue.operands if problem.epilogue else ())))
    names = ("out", *(role for role, _ in problem.operands), *extra, *behind, *BUFFERS)
    operands: list[tuple[int, Description | None]] = []
    scalars, constants, words, doubles = [], [], [], False
    for argument in arguments:
        match argument.source:
            case ("pointer", name):
                if argument.type == "*i32" and name not in (*behind, *BUFFERS):
                    words.append(len(operands))
                operands.append((names.index(name), None))
            case ("descriptor", name):
                operands.append((names.index(name), Description.of(getattr(problem, name), blocks[name])))
            case ("scalar", name):
                scalars.append(problem.operation.scalars.index(name))
                doubles = argument.type == "fp64"
            case ("size", letter):
                constants.append(getattr(problem, letter))
            case ("stride", operand, dim):
                constants.append(strides_of(*layouts[operand])[dim])
            case ("scale", name, dim):
                constants.append(getattr(problem, name).stride[dim])
            case ("runtime", name):
                constants.append(getattr(where, name))
    return Record(
        grid=where.grid,
        pdl=pdl,
        operands=tuple(operands),
        scalars=tuple(scalars),
        constants=tuple(constants),
        words=tuple(words),
        buffers=buffers if any(argument.source[-1] in BUFFERS for argument in arguments) else None,
        doubles=doubles,
    )


def bind(loaded: Any, record: Record, *, interpret: bool) -> Kernel:
    """The kernel for the current GPU, which must be the current device again at each call; or with ``interpret`` a function
    on the CPU, in Triton's interpreter."""
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
        # Triton's own launcher makes the descriptors, and launches in order, where its version is not known.
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
    """The same as plain data for the current device; None where Triton's launcher does more, or may.

    A kernel's parameters are its arguments, then addresses of two memories that Triton may want, which are null here.
    """
    if not torch.cuda.is_available() or launcher_of(loaded, record.grid).function is loaded.run:
        return None
    metas = _metas(loaded, record)
    if loaded.run.launch_cooperative_grid or loaded.metadata.num_ctas != 1 or None in metas:
        return None
    driver = find_driver()
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
        memory=None if acquire is None else Memory(tensors=acquire, capture=driver.capture_info),
        maps=tuple(_number(place) for place, _ in described),
        encode=lambda number, address: encoded_bytes(encoders[number](address)[0]),
    )


def _metas(loaded: Any, record: Record) -> list[Any]:
    """What Triton says of each operand that is a descriptor; None where the kernel has the numbers of one instead."""
    count = sum(how is not None for _, how in record.operands)
    return list(loaded.metadata.tensordesc_meta or [None] * count) if count else []


def _number(place: int) -> int:
    """The number of the address of an operand, by its place among the result, the tensors of a call, and buffers."""
    return toolchain_record.OUT if place == 0 else toolchain_record.A + place - 1


def launch_record(record: Record, metadata: Any) -> toolchain_record.Record:
    """What the driver is told of a launch. ``metadata`` is Triton's.

    Each parameter has a slot of 8 bytes, of which the kernel reads as many as its type has; descriptors are before all of these.
    A descriptor is followed by the sizes and strides that it has.
    """
    first = toolchain_record.MAP_BYTES * sum(how is not None for _, how in record.operands)
    slots: list[int] = []
    arguments: list[int] = []
    addresses: list[toolchain_record.Address] = []
    scalars: list[toolchain_record.Scalar] = []

    def add(*values: int) -> None:
        arguments.extend(range(first + 8 * len(slots), first + 8 * (len(slots) + len(values)), 8))
        slots.extend(values)

    maps = 0
    for place, how in record.operands:
        if how is None:
            addresses.append(toolchain_record.Address(offset=first + 8 * len(slots), operand=_number(place)))
            add(0)
        else:
            arguments.append(toolchain_record.MAP_BYTES * maps)
            maps += 1
            add(*how.shape, *how.strides)
    for place in record.scalars:
        scalars.append(toolchain_record.Scalar(offset=first + 8 * len(slots), number=place, wide=record.doubles))
        add(0)
    add(*record.constants, 0, 0)
    return toolchain_record.Record(
        kernel=metadata.name,
        grid=record.grid,
        cluster=0,
        threads=metadata.num_warps * metadata.target.warp_size,
        shared_bytes=metadata.shared,
        pdl=record.pdl,
        parameters=bytes(first) + struct.pack(f"{len(slots)}q", *slots),
        arguments=tuple(arguments),
        addresses=tuple(addresses),
        scalars=tuple(scalars),
    )


def _interpreted(function: Any, record: Record) -> Run:
    """A ``Run`` in the interpreter, which reads 8-bit floats as bytes, and words as those of the first column."""

    def readable(index: int, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype.itemsize > 1:
            return value
        if index in record.words:
            return value.as_strided((value.shape[0],), (1,)).view(torch.int32)
        return value.view(torch.uint8) if value.dtype in FLOAT8 else value

    def launch(_stream: int, *values: Any) -> None:
        function[record.grid](*(readable(index, value) for index, value in enumerate(values)))

    def acquire(_stream: int) -> Sequence[Tensor]:
        assert record.buffers is not None
        return record.buffers.interpreted()

    return _by_triton(launch, lambda: 0, record, acquire if record.buffers is not None else None)


def _by_triton(launch: Callable[..., None], stream_of: Callable[[], int], record: Record, acquire: Acquire | None) -> Run:
    """A ``Run`` whose arguments are tensors, and Triton's own descriptors."""

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
        # An inp that beta keeps unread comes after a and b.
        values = (tensors[0].data_ptr(), tensors[1].data_ptr(), out.data_ptr(), *tail)
        if packed:
            function(x, y, z, stream_of(device), *middle, values)
        else:
            function(x, y, z, stream_of(device), *middle, *values)

    return run


def _bind_general(
    call: Launcher, device: int, record: Record, encode: Sequence[Callable[[int], Sequence[Any]] | None], acquire: Acquire | None
) -> Run:
    """``encode`` makes the arguments of those operands that are descriptors."""
    function, (x, y, z), middle, packed = call.function, call.grid, call.middle, call.packed
    stream_of = torch._C._cuda_getCurrentRawStream
    operands = [(place, encoded) for (place, _), encoded in zip(record.operands, encode, strict=True)]
    passed, tail = record.scalars, record.constants

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        stream = stream_of(device)
        # Buffers are held until the launch, not until the kernel's end: torch's allocator hands memory on in the stream's order.
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
