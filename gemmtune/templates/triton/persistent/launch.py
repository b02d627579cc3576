"""Launching kernels some of whose operands are tensor descriptors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....choice import Run
from ....problem import Problem
from ..geometry import Geometry
from ..kernels import initialise
from ..launch import Launcher, constants_of, launcher_of
from ..source import Argument
from .descriptors import Description, describe, encoder, takes_encoded

__all__ = ["bind_described", "interpret_described"]

Extra = tuple[Tensor, ...]
Grid = tuple[int, int, int]
Blocks = Mapping[str, tuple[int, int]]


def descriptions(problem: Problem, blocks: Blocks) -> dict[str, Description]:
    """Of the operands that the kernel has as descriptors."""
    layouts = {"a": problem.a, "b": problem.b, "out": problem.out}
    return {name: Description.of(layouts[name], block) for name, block in blocks.items()}


def _by_name(out: Tensor, a: Tensor, b: Tensor, inp: Tensor | None, alpha: float, beta: float, extra: Extra) -> dict[str, Any]:
    return {"out": out, "a": a, "b": b, "inp": inp, "alpha": alpha, "beta": beta, **{f"x{i}": x for i, x in enumerate(extra)}}


def interpret_described(
    function: Any, arguments: Sequence[Argument], problem: Problem, where: Geometry, grid: Grid, blocks: Blocks
) -> Run:
    """A ``Run`` that executes the kernel on the CPU in Triton's interpreter."""
    return _by_triton(function[grid], arguments, constants_of(arguments, problem, where), descriptions(problem, blocks))


def _by_triton(
    launch: Callable[..., None],
    arguments: Sequence[Argument],
    constants: Mapping[str, int],
    described: Mapping[str, Description],
) -> Run:
    """With tensors, and Triton's own descriptors, as arguments."""

    def run(out: Tensor, a: Tensor, b: Tensor, inp: Tensor | None, alpha: float, beta: float, extra: Extra) -> None:
        given = _by_name(out, a, b, inp, alpha, beta, extra)
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
        launch(*values)

    return run


def bind_described(
    compiled: Any,
    arguments: Sequence[Argument],
    problem: Problem,
    where: Geometry,
    grid: Grid,
    blocks: Blocks,
    *,
    pdl: bool,
) -> Run:
    """A ``Run`` for the current CUDA device, which must be the current device again at each call.

    Where the version of Triton is not known, its own launcher makes the descriptors, and launches in order.
    """
    initialise(compiled)
    device = torch.cuda.current_device()
    described = descriptions(problem, blocks)
    constants = constants_of(arguments, problem, where)
    encoded_call = takes_encoded(compiled, launcher_of(compiled, grid, pdl=pdl))
    if encoded_call is None:
        middle = (compiled.function, compiled.packed_metadata, None, None, None)

        def launch(*values: Any) -> None:
            compiled.run(*grid, torch.cuda.current_stream(device).cuda_stream, *middle, *values)

        return _by_triton(launch, arguments, constants, described)
    order = [argument.source[1] for argument in arguments if argument.source[0] == "descriptor"]
    encode = {name: encoder(described[name], meta) for name, meta in zip(order, compiled.metadata.tensordesc_meta, strict=True)}
    tail = tuple(constants[a.name] for a in arguments if a.name in constants)
    varying = [argument.source[0] for argument in arguments if argument.name not in constants]
    if order == ["a", "b", "out"] and varying == ["descriptor"] * 3:
        return _bind_plain(encoded_call, device, encode, tail)
    return _bind_general(encoded_call, device, encode, arguments, tail)


Encode = Mapping[str, Callable[[int], Sequence[Any]]]


def _bind_plain(call: Launcher, device: int, encode: Encode, tail: tuple[int, ...]) -> Run:
    """A product without bias, scalars or epilogue operands, all of whose operands have descriptors."""
    function, (x, y, z), middle, packed = call.function, call.grid, call.middle, call.packed
    of_a, of_b, of_out = encode["a"], encode["b"], encode["out"]
    stream_of = torch._C._cuda_getCurrentRawStream

    def run_flat(out: Tensor, a: Tensor, b: Tensor, inp: Tensor | None, alpha: float, beta: float, extra: Extra) -> None:  # noqa: ARG001
        values = (*of_a(a.data_ptr()), *of_b(b.data_ptr()), *of_out(out.data_ptr()))
        function(x, y, z, stream_of(device), *middle, *values, *tail)

    def run_packed(out: Tensor, a: Tensor, b: Tensor, inp: Tensor | None, alpha: float, beta: float, extra: Extra) -> None:  # noqa: ARG001
        values = (*of_a(a.data_ptr()), *of_b(b.data_ptr()), *of_out(out.data_ptr()), *tail)
        function(x, y, z, stream_of(device), *middle, values)

    return run_packed if packed else run_flat


def _bind_general(call: Launcher, device: int, encode: Encode, arguments: Sequence[Argument], tail: tuple[int, ...]) -> Run:
    function, (x, y, z), middle, packed = call.function, call.grid, call.middle, call.packed
    stream_of = torch._C._cuda_getCurrentRawStream
    operands = [(a.source[1], encode.get(a.source[1])) for a in arguments if a.source[0] in ("pointer", "descriptor")]
    scalars = [a.source[1] for a in arguments if a.source[0] == "scalar"]

    def run(out: Tensor, a: Tensor, b: Tensor, inp: Tensor | None, alpha: float, beta: float, extra: Extra) -> None:
        given = _by_name(out, a, b, inp, alpha, beta, extra)
        values: list[Any] = []
        for name, described in operands:
            address = given[name].data_ptr()
            if described is None:
                values.append(address)
            else:
                values += described(address)
        values += [given[name] for name in scalars]
        if packed:
            function(x, y, z, stream_of(device), *middle, (*values, *tail))
        else:
            function(x, y, z, stream_of(device), *middle, *values, *tail)

    return run
