"""The parameters that the kernels of every family have, and how a launch fills them in."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

from ...problem import Layout, Problem
from ...toolchain.launch import MOST_OPERANDS, strides_of
from ...toolchain.record import OUT, Address, Aligned, Scalar, operand_at
from ...toolchain.structs import Strides, struct_text

__all__ = ["Work", "addresses_of", "aligned_out", "fill_common", "scalars_of", "structs_of"]


class Operand(ctypes.Structure):
    """An operand beside a and b, as it is broadcast to the result."""

    _fields_ = [("data", ctypes.c_void_p), ("strides", Strides)]


class Scalars(ctypes.Structure):
    """The factors of a call."""

    _fields_ = [("alpha", ctypes.c_float), ("beta", ctypes.c_float)]


class Epilogue(ctypes.Structure):
    """What the epilogue reads."""

    _fields_ = [("x", Operand * MOST_OPERANDS), ("scalars", Scalars)]


class Work(ctypes.Structure):
    """What every kernel is told; families add sizes and more."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("out", ctypes.c_void_p), ("out_strides", Strides), ("epilogue", Epilogue))


def structs_of(work: type[Work], types: dict[str, str]) -> str:
    """C++: the structs of ``work`` and what it is made of; ``types`` has the types of its pointers."""
    common = [struct_text(one, {}) for one in (Strides, Operand, Scalars, Epilogue)]
    return "\n\n".join([*common, struct_text(work, types, name="Work")])


def fill_common(work: Work, out: Layout, operands: Sequence[Layout]) -> None:
    """Strides of the result and of the operands beside a and b."""
    work.out_strides = strides_of(out)
    for i, layout in enumerate(operands):
        work.epilogue.x[i].strides = strides_of(layout)


def addresses_of(count: int) -> tuple[Address, ...]:
    """The places in a Work of the addresses of the result and of ``count`` operands beside a and b."""
    first = Work.epilogue.offset + Epilogue.x.offset + Operand.data.offset
    return (
        Address(offset=Work.out.offset, operand=OUT),
        *(Address(offset=first + i * ctypes.sizeof(Operand), operand=operand_at(i)) for i in range(count)),
    )


def scalars_of(problem: Problem) -> tuple[Scalar, ...]:
    """The places in a Work of the scalars that are not known before a call."""
    first = Work.epilogue.offset + Epilogue.scalars.offset
    general = (problem.alpha == "general", problem.inp_read is not None and problem.beta == "general")
    fields = (Scalars.alpha, Scalars.beta)
    return tuple(Scalar(offset=first + field.offset, number=i) for i, field in enumerate(fields) if general[i])


def aligned_out(field: Any, layout: Layout, elements: int) -> tuple[bool, tuple[Aligned, ...]]:
    """Whether so many neighbours in a row of the result can be stored at once by its strides, and what that asks of its address.

    ``field`` of a Work says so to the kernel.
    """
    strides = strides_of(layout)
    whole = strides.col == 1 and strides.row % elements == 0 and strides.batch % elements == 0
    place = Aligned(offset=field.offset, operand=OUT, multiple_bytes=elements * layout.dtype.itemsize)
    return whole, (place,) if whole else ()
