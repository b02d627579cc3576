"""Launching a compiled kernel with as little work on the host as Python allows.

Everything that does not change from call to call is bound once: grid, sizes, strides, the function's handle. Pointers are given as
integers, which Triton's launcher takes as they are. Some operands may be tensor descriptors, made of their addresses.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...choice import Run, Scalars, Tensors
from ...problem import Problem
from ...problem.dtypes import FLOAT8
from .classes import Argument, shaped, strides_of
from .configs import Geometry
from .descriptors import Description, describe, encoder
from .kernels import toolchain
from .workspace import BUFFERS, Acquire, Buffers

__all__ = ["Blocks", "Launcher", "bind", "launcher_of", "takes_encoded"]

Blocks = Mapping[str, tuple[int, int]]
"""Operands that the kernel has as descriptors, each with the block that is moved at a time."""
PLAIN = [("pointer", "a"), ("pointer", "b"), ("pointer", "out")]
"""What varies from call to call of a product without bias, scalars, epilogue operands or splits."""
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


def _constants(arguments: Sequence[Argument], problem: Problem, where: Geometry) -> dict[str, int]:
    """The values of every argument that is the same in each call, by argument name."""
    layouts = shaped(problem)
    values: dict[str, int] = {}
    for argument in arguments:
        match argument.source:
            case ("size", letter):
                values[argument.name] = getattr(problem, letter)
            case ("stride", operand, dim):
                layout, shape = layouts[operand]
                values[argument.name] = strides_of(layout, shape)[dim]
            case ("scale", name, dim):
                values[argument.name] = getattr(problem, name).stride[dim]
            case ("runtime", name):
                values[argument.name] = getattr(where, name)
    return values


def _tensor_names(problem: Problem) -> tuple[str, ...]:
    """The names of out and of the tensors of a call, in its order."""
    operands = problem.epilogue.operands if problem.epilogue else ()
    return ("out", *(role for role, _ in problem.operands), *(f"x{i}" for i in range(len(operands))))


def bind(
    loaded: Any,
    arguments: Sequence[Argument],
    problem: Problem,
    where: Geometry,
    *,
    blocks: Blocks | None = None,
    buffers: Buffers | None = None,
    interpret: bool,
    pdl: bool,
) -> Run:
    """A ``Run`` of a kernel for the current CUDA device, which must be the current device again at each call; or with ``interpret``
    of a function on the CPU, in Triton's interpreter."""
    described = {name: Description.of(getattr(problem, name), block) for name, block in (blocks or {}).items()}
    needs = any(argument.source[-1] in BUFFERS for argument in arguments)
    if not interpret:
        return _bind_compiled(loaded, arguments, problem, where, described, buffers if needs else None, pdl=pdl)

    def readable(value: Any, argument: Argument) -> Any:
        """A tensor as the interpreter reads it: 8-bit floats as bytes, and for a kernel of words the words of the first column."""
        if not isinstance(value, Tensor) or value.dtype.itemsize > 1:
            return value
        if argument.type == "*i32":
            return value.as_strided((value.shape[0],), (1,)).view(torch.int32)
        return value.view(torch.uint8) if value.dtype in FLOAT8 else value

    def launch(_stream: int, *values: Any) -> None:
        loaded[where.grid](*map(readable, values, arguments))

    def acquire(_stream: int) -> Sequence[Tensor]:
        assert buffers is not None
        return buffers.interpreted()

    return _by_triton(launch, lambda: 0, arguments, problem, where, described, acquire if needs else None)


def _by_triton(
    launch: Callable[..., None],
    stream_of: Callable[[], int],
    arguments: Sequence[Argument],
    problem: Problem,
    where: Geometry,
    described: Mapping[str, Description],
    acquire: Acquire | None,
) -> Run:
    """A ``Run`` whose arguments are tensors, and Triton's own descriptors."""
    constants = _constants(arguments, problem, where)
    names = (*_tensor_names(problem), *problem.operation.scalars)

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        stream = stream_of()
        given: dict[str, Any] = dict(zip(names, (out, *tensors, *scalars), strict=True))
        if acquire is not None:
            given.update(zip(BUFFERS, acquire(stream), strict=True))
        values: list[Any] = []
        for argument in arguments:
            match argument.source:
                case ("descriptor", name):
                    values.append(describe(given[name], described[name]))
                case ("pointer", name):
                    values.append(given[name])
                case ("scalar", name):
                    values.append(float(given[name]))
                case _:
                    values.append(constants[argument.name])
        launch(stream, *values)

    return run


def _bind_compiled(
    compiled: Any,
    arguments: Sequence[Argument],
    problem: Problem,
    where: Geometry,
    described: Mapping[str, Description],
    buffers: Buffers | None,
    *,
    pdl: bool,
) -> Run:
    """A ``Run`` on a GPU. Triton's own launcher makes the descriptors, and launches in order, where its version is not known."""
    device = torch.cuda.current_device()
    acquire = buffers.on(device) if buffers is not None else None
    launcher = launcher_of(compiled, where.grid, pdl=pdl)
    call = takes_encoded(compiled, launcher) if described else launcher
    if call is None:
        middle = (compiled.function, compiled.packed_metadata, None, None, None)

        def launch(stream: int, *values: Any) -> None:
            compiled.run(*where.grid, stream, *middle, *values)

        def stream_of() -> int:
            return torch.cuda.current_stream(device).cuda_stream

        return _by_triton(launch, stream_of, arguments, problem, where, described, acquire)
    constants = _constants(arguments, problem, where)
    tail = tuple(constants[argument.name] for argument in arguments if argument.name in constants)
    if [argument.source for argument in arguments if argument.name not in constants] == PLAIN:
        return _bind_plain(call, device, tail)
    order = [argument.source[1] for argument in arguments if argument.source[0] == "descriptor"]
    metas = compiled.metadata.tensordesc_meta if order else ()
    encode = {name: encoder(described[name], meta) for name, meta in zip(order, metas, strict=True)}
    return _bind_general(call, device, problem, arguments, encode, tail, acquire)


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
    call: Launcher,
    device: int,
    problem: Problem,
    arguments: Sequence[Argument],
    encode: Mapping[str, Callable[[int], Sequence[Any]]],
    tail: tuple[int, ...],
    acquire: Acquire | None,
) -> Run:
    function, (x, y, z), middle, packed = call.function, call.grid, call.middle, call.packed
    stream_of = torch._C._cuda_getCurrentRawStream
    places = {name: place for place, name in enumerate((*_tensor_names(problem), *BUFFERS))}
    named = [argument.source[1] for argument in arguments if argument.source[0] in ("pointer", "descriptor")]
    operands = [(places[name], encode.get(name)) for name in named]
    passed = [problem.operation.scalars.index(argument.source[1]) for argument in arguments if argument.source[0] == "scalar"]

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
