"""Launching a compiled kernel with as little work on the host as Python allows.

Everything that does not change from call to call is bound once: grid, sizes, strides, the function's handle. Pointers are given as
integers, which Triton's launcher takes as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...choice import Run, Scalars, Tensors
from ...problem import Layout, Problem
from ...problem.dtypes import FLOAT8
from .configs import Config
from .geometry import Geometry
from .kernels import toolchain
from .source import Argument
from .spec import strides_of
from .workspace import Workspace

__all__ = ["Launcher", "bind_compiled", "bind_interpreted", "constants_of", "launcher_of"]

FLAT_VERSIONS = ((3, 6),)
"""Versions of Triton whose C launcher takes the kernel's arguments one by one, after its own."""
PACKED_VERSIONS = ((3, 7), (3, 8), (3, 9))
"""Versions whose C launcher takes them as one tuple, after a description of their types."""


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


def constants_of(arguments: Sequence[Argument], problem: Problem, where: Geometry) -> dict[str, int]:
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


def _named(problem: Problem, out: Tensor, tensors: Tensors) -> dict[str, Tensor]:
    """Each tensor by the name of its argument; 8-bit floats as the bytes that the interpreter reads."""
    roles = [role for role, _ in problem.operands]
    names = ["out", *roles, *(f"x{i}" for i in range(len(tensors) - len(roles)))]
    given = dict(zip(names, (out, *tensors), strict=True))
    return {name: x.view(torch.uint8) if x.dtype in FLOAT8 else x for name, x in given.items()}


def bind_interpreted(function: Any, arguments: Sequence[Argument], problem: Problem, where: Geometry, config: Config) -> Run:
    """A ``Run`` that executes the kernel on the CPU in Triton's interpreter."""
    constants = constants_of(arguments, problem, where)
    elements = config.block_m * config.block_n * where.slots

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        values: list[Any] = []
        named, factors = _named(problem, out, tensors), dict(zip(problem.operation.scalars, scalars, strict=True))
        for argument in arguments:
            match argument.source:
                case ("pointer", "workspace"):
                    values.append(torch.full((elements,), _unwritten(problem.accumulator), dtype=problem.accumulator))
                case ("pointer", "counters"):
                    values.append(torch.zeros(where.counters, dtype=torch.int32))
                case ("pointer", name):
                    values.append(_as_words(named[name]) if argument.type == "*i32" else named[name])
                case ("scalar", name):
                    values.append(float(factors[name]))
                case _:
                    values.append(constants[argument.name])
        function[where.grid](*values)

    return run


def _as_words(x: Tensor) -> Tensor:
    """A tensor of bytes as the 32-bit words of its first column, whose address is what a kernel for words is given."""
    return x.as_strided((x.shape[0],), (1,)).view(torch.int32) if x.dtype.itemsize == 1 else x


def _unwritten(dtype: torch.dtype) -> float:
    """A number that shows in the result if a partial sum is used that was never written."""
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max // 3


def bind_compiled(compiled: Any, arguments: Sequence[Argument], problem: Problem, where: Geometry, config: Config) -> Run:
    """A ``Run`` for the current CUDA device, which must be the current device again at each call."""
    device = torch.cuda.current_device()
    constants = constants_of(arguments, problem, where)
    tail = tuple(constants[a.name] for a in arguments if a.name in constants)
    pointers = [a.source[1] for a in arguments if a.source[0] == "pointer"]
    scalars = [a.source[1] for a in arguments if a.source[0] == "scalar"]
    call = launcher_of(compiled, where.grid, pdl=config.pdl)
    if pointers == ["a", "b", "out"] and not scalars:
        return _bind_plain(call, device, tail)
    workspace = None
    if "workspace" in pointers:
        size_bytes = config.block_m * config.block_n * where.slots * problem.accumulator.itemsize
        workspace = Workspace(device=device, size_bytes=size_bytes, counters=where.counters)
    return _bind_general(call, device, problem, tuple(scalars), tail, workspace)


def _bind_plain(call: Launcher, device: int, tail: tuple[int, ...]) -> Run:
    """A product without bias, scalars, epilogue operands or splits."""
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
    call: Launcher, device: int, problem: Problem, passed: tuple[str, ...], tail: tuple[int, ...], workspace: Workspace | None
) -> Run:
    """``passed`` names the scalars that the kernel takes."""
    function, (x, y, z), middle, packed = call.function, call.grid, call.middle, call.packed
    stream_of = torch._C._cuda_getCurrentRawStream
    skips_inp = problem.inp is not None and problem.inp_read is None
    places = [problem.operation.scalars.index(name) for name in passed]

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        stream = stream_of(device)
        values: list[float] = [tensor.data_ptr() for tensor in tensors]
        if skips_inp:
            del values[2]
        values.append(out.data_ptr())
        # The buffers must outlive the launch, not the kernel: torch's allocator hands them on in the order of the stream.
        buffers = workspace.acquire(stream) if workspace is not None else ()
        values += [buffer.data_ptr() for buffer in buffers]
        values += [scalars[place] for place in places]
        if packed:
            function(x, y, z, stream, *middle, (*values, *tail))
        else:
            function(x, y, z, stream, *middle, *values, *tail)

    return run


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
    middle: tuple[Any, ...]
    if version in FLAT_VERSIONS:
        middle = (handle, *flags, None, None, metadata, None, None, None)
    else:
        middle = (handle, *flags, metadata, None, None, None, None, None, launcher.arg_annotations, launcher.kernel_signature)
    return Launcher(function=launcher.launch, grid=grid, middle=middle, packed=version in PACKED_VERSIONS)
