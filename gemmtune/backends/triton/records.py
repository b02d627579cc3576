"""Launches of Triton kernels as plain data, made from a problem and converted to the driver's form."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...problem import Problem
from ...toolchain import record as toolchain_record
from ...toolchain.triton_kernels import Argument
from .classes import shaped, strides_of
from .configs import Geometry
from .descriptors import Description
from .workspace import BUFFERS, Buffers

Blocks = Mapping[str, tuple[int, int]]
"""Descriptor operands of a kernel, each with the block that one copy moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Launch of a kernel for one problem, as plain data.

    The kernel's arguments are ``operands``, ``scalars`` and ``constants``, in this order. ``operands`` are indices into (out, the
    tensors of a call, the buffers). Descriptor operands also have a description; the others are pointers. ``scalars`` are indices
    into the scalars of a call. ``words`` lists the operands that the kernel reads as 32-bit words, whatever their dtype.
    ``buffers`` is None if the kernel needs no more memory. With ``doubles`` the scalars have 64 bits.
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
    """Return the launch of a kernel for ``problem``. ``behind`` names further tensors that follow the tensors of a call."""
    extra = (f"x{i}" for i in range(len(problem.epilogue.operands if problem.epilogue else ())))
    names = ("out", *(role for role, _ in problem.operands), *extra, *behind, *BUFFERS)
    operands: list[tuple[int, Description | None]] = []
    scalars, constants, words = [], [], []
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
            case source:
                constants.append(_constant(source, problem, where))
    return Record(
        grid=where.grid,
        pdl=pdl,
        operands=tuple(operands),
        scalars=tuple(scalars),
        constants=tuple(constants),
        words=tuple(words),
        buffers=buffers if any(argument.source[-1] in BUFFERS for argument in arguments) else None,
        doubles=any(argument.source[0] == "scalar" and argument.type == "fp64" for argument in arguments),
    )


def _constant(source: tuple[Any, ...], problem: Problem, where: Geometry) -> int:
    match source:
        case ("size", letter):
            value: int = getattr(problem, letter)
        case ("stride", operand, dim):
            value = strides_of(*shaped(problem)[operand])[dim]
        case ("scale", name, dim):
            value = getattr(problem, name).stride[dim - 2]
        case (_, name):  # "runtime"
            value = getattr(where, name)
    return value


def operand_number(place: int) -> int:
    """Return the number of an operand's address from its index among the result, the tensors of a call, and the buffers."""
    return toolchain_record.OUT if place == 0 else toolchain_record.A + place - 1


def launch_record(record: Record, metadata: Any) -> toolchain_record.Record:
    """Return the driver's launch: descriptors, 8 bytes per parameter, descriptors' sizes and strides. ``metadata`` is Triton's."""
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
            addresses.append(toolchain_record.Address(offset=first + 8 * len(slots), operand=operand_number(place)))
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
