"""Launching kernels some of whose operands may be tensor descriptors, and which may need buffers beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....choice import Run, Scalars, Tensors
from ....problem import Problem
from ....problem.dtypes import FLOAT8
from ..geometry import Geometry
from ..launch import Launcher, constants_of, launcher_of
from ..source import Argument
from ..workspace import Buffers
from .descriptors import Description, describe, encoder, takes_encoded

__all__ = ["Blocks", "bind_described", "interpret_described"]

Grid = tuple[int, int, int]
Blocks = Mapping[str, tuple[int, int]]
"""Operands that the kernel has as descriptors, each with the block that is moved at a time."""
Acquire = Callable[[int], Mapping[str, Tensor]]
"""The handle of a stream to the buffers of a launch, by name."""


def descriptions(problem: Problem, blocks: Blocks) -> dict[str, Description]:
    """Descriptions of the operands that the kernel has as descriptors."""
    layouts = {"a": problem.a, "b": problem.b, "out": problem.out}
    return {name: Description.of(layouts[name], block) for name, block in blocks.items()}


def names_of(problem: Problem) -> tuple[str, ...]:
    """The names of what a call is given: out, its tensors and its scalars."""
    operands = problem.epilogue.operands if problem.epilogue else ()
    roles = [role for role, _ in problem.operands]
    return ("out", *roles, *(f"x{i}" for i in range(len(operands))), *problem.operation.scalars)


def interpret_described(
    function: Any,
    arguments: Sequence[Argument],
    problem: Problem,
    where: Geometry,
    grid: Grid,
    blocks: Blocks,
    buffers: Buffers | None = None,
) -> Run:
    """A ``Run`` that executes the kernel on the CPU in Triton's interpreter."""

    def acquire(stream: int) -> Mapping[str, Tensor]:  # noqa: ARG001
        return buffers.interpreted() if buffers is not None else {}

    def launch(stream: int, *values: Any) -> None:  # noqa: ARG001
        function[grid](*(x.view(torch.uint8) if isinstance(x, Tensor) and x.dtype in FLOAT8 else x for x in values))

    return _by_triton(launch, lambda: 0, arguments, problem, where, blocks, acquire)


def _by_triton(
    launch: Callable[..., None],
    stream_of: Callable[[], int],
    arguments: Sequence[Argument],
    problem: Problem,
    where: Geometry,
    blocks: Blocks,
    acquire: Acquire | None,
) -> Run:
    """A ``Run`` whose arguments are tensors, and Triton's own descriptors."""
    constants, described, names = constants_of(arguments, problem, where), descriptions(problem, blocks), names_of(problem)

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        stream = stream_of()
        given: dict[str, Any] = dict(zip(names, (out, *tensors, *scalars), strict=True))
        if acquire is not None:
            given.update(acquire(stream))
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


def bind_described(
    compiled: Any,
    arguments: Sequence[Argument],
    problem: Problem,
    where: Geometry,
    grid: Grid,
    blocks: Blocks,
    buffers: Buffers | None = None,
    *,
    pdl: bool,
) -> Run:
    """A ``Run`` for the current CUDA device, which must be the current device again at each call.

    Where the version of Triton is not known, its own launcher makes the descriptors, and launches in order.
    """
    device = torch.cuda.current_device()
    acquire = buffers.on(device) if buffers is not None else None
    plain = launcher_of(compiled, grid, pdl=pdl)
    call = takes_encoded(compiled, plain) if blocks else plain
    if call is None:
        middle = (compiled.function, compiled.packed_metadata, None, None, None)

        def launch(stream: int, *values: Any) -> None:
            compiled.run(*grid, stream, *middle, *values)

        def stream_of() -> int:
            return torch.cuda.current_stream(device).cuda_stream

        return _by_triton(launch, stream_of, arguments, problem, where, blocks, acquire)
    constants, described = constants_of(arguments, problem, where), descriptions(problem, blocks)
    order = [argument.source[1] for argument in arguments if argument.source[0] == "descriptor"]
    metas = compiled.metadata.tensordesc_meta if order else ()
    encode = {name: encoder(described[name], meta) for name, meta in zip(order, metas, strict=True)}
    tail = tuple(constants[a.name] for a in arguments if a.name in constants)
    varying = [argument.source[0] for argument in arguments if argument.name not in constants]
    if order == ["a", "b", "out"] and varying == ["descriptor"] * 3:
        return _bind_plain(call, device, encode, tail)
    return _bind_general(call, device, encode, names_of(problem), arguments, tail, acquire)


Encode = Mapping[str, Callable[[int], Sequence[Any]]]


def _bind_plain(call: Launcher, device: int, encode: Encode, tail: tuple[int, ...]) -> Run:
    """A product without bias, scalars or epilogue operands, all of whose operands have descriptors."""
    function, (x, y, z), middle, packed = call.function, call.grid, call.middle, call.packed
    of_a, of_b, of_out = encode["a"], encode["b"], encode["out"]
    stream_of = torch._C._cuda_getCurrentRawStream

    def run_flat(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:  # noqa: ARG001
        a, b = tensors[0], tensors[1]  # an inp that beta keeps unread comes after them
        values = (*of_a(a.data_ptr()), *of_b(b.data_ptr()), *of_out(out.data_ptr()))
        function(x, y, z, stream_of(device), *middle, *values, *tail)

    def run_packed(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:  # noqa: ARG001
        a, b = tensors[0], tensors[1]  # an inp that beta keeps unread comes after them
        values = (*of_a(a.data_ptr()), *of_b(b.data_ptr()), *of_out(out.data_ptr()), *tail)
        function(x, y, z, stream_of(device), *middle, values)

    return run_packed if packed else run_flat


def _bind_general(
    call: Launcher,
    device: int,
    encode: Encode,
    names: Sequence[str],
    arguments: Sequence[Argument],
    tail: tuple[int, ...],
    acquire: Acquire | None = None,
) -> Run:
    function, (x, y, z), middle, packed = call.function, call.grid, call.middle, call.packed
    stream_of = torch._C._cuda_getCurrentRawStream
    operands = [(a.source[1], encode.get(a.source[1])) for a in arguments if a.source[0] in ("pointer", "descriptor")]
    factors = [a.source[1] for a in arguments if a.source[0] == "scalar"]

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        stream = stream_of(device)
        given: dict[str, Any] = dict(zip(names, (out, *tensors, *scalars), strict=True))
        if acquire is not None:
            # Held until the launch, not until the kernel's end: torch's allocator hands memory on in the order of the stream.
            given.update(acquire(stream))
        values: list[Any] = []
        for name, described in operands:
            address = given[name].data_ptr()
            if described is None:
                values.append(address)
            else:
                values += described(address)
        values += [given[name] for name in factors]
        if packed:
            function(x, y, z, stream, *middle, (*values, *tail))
        else:
            function(x, y, z, stream, *middle, *values, *tail)

    return run
