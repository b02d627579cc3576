"""Launching a compiled kernel with as little work on the host as Python allows.

Everything that does not change from call to call is bound once: grid, sizes, strides, the function's handle. Pointers are given as
integers, which Triton's launcher takes as they are. Some operands may be tensor descriptors, made of their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...choice import Run, Scalars, Tensors
from ...problem import Layout, Problem
from ...problem.dtypes import FLOAT8
from .arguments import Argument
from .descriptors import Description, describe, encoder
from .geometry import Geometry
from .launcher import Launcher, launcher_of, takes_encoded
from .spec import strides_of
from .workspace import BUFFERS, Acquire, Buffers

__all__ = ["Blocks", "bind"]

Blocks = Mapping[str, tuple[int, int]]
"""Operands that the kernel has as descriptors, each with the block that is moved at a time."""
PLAIN = [("pointer", "a"), ("pointer", "b"), ("pointer", "out")]
"""What varies from call to call of a product without bias, scalars, epilogue operands or splits."""


def _layouts(problem: Problem) -> dict[str, tuple[Layout, tuple[int, int, int]]]:
    out = (problem.batch, problem.m, problem.n)
    layouts = {
        "a": (problem.a, (problem.batch, problem.m, problem.k)),
        "b": (problem.b, (problem.batch, problem.b.size[-2], problem.n)),
        "out": (problem.out, out),
    }
    if problem.c is not None and problem.d is not None:
        layouts["c"] = (problem.c, (1, problem.m, problem.k2))
        layouts["d"] = (problem.d, (1, problem.k2, problem.n))
    if problem.inp is not None:
        layouts["inp"] = (problem.inp, out)
    for i, layout in enumerate(problem.epilogue.operands if problem.epilogue else ()):
        layouts[f"x{i}"] = (layout, out)
    return layouts


def _constants(arguments: Sequence[Argument], problem: Problem, where: Geometry) -> dict[str, int]:
    """The values of every argument that is the same in each call, by argument name."""
    layouts = _layouts(problem)
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

    def launch(_stream: int, *values: Any) -> None:
        loaded[where.grid](*map(_readable, values, arguments))

    def acquire(_stream: int) -> Sequence[Tensor]:
        assert buffers is not None
        return buffers.interpreted()

    return _by_triton(launch, lambda: 0, arguments, problem, where, described, acquire if needs else None)


def _readable(value: Any, argument: Argument) -> Any:
    """A tensor as the interpreter reads it: 8-bit floats as bytes, and for a kernel of words the words of the first column."""
    if not isinstance(value, Tensor) or value.dtype.itemsize > 1:
        return value
    if argument.type == "*i32":
        return value.as_strided((value.shape[0],), (1,)).view(torch.int32)
    return value.view(torch.uint8) if value.dtype in FLOAT8 else value


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

    def run_flat(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:  # noqa: ARG001
        a, b = tensors[0], tensors[1]  # an inp that beta keeps unread comes after them
        function(x, y, z, stream_of(device), *middle, a.data_ptr(), b.data_ptr(), out.data_ptr(), *tail)

    def run_packed(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:  # noqa: ARG001
        a, b = tensors[0], tensors[1]  # an inp that beta keeps unread comes after them
        function(x, y, z, stream_of(device), *middle, (a.data_ptr(), b.data_ptr(), out.data_ptr(), *tail))

    return run_packed if packed else run_flat


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
