"""C++ structs generated from ctypes, so that a kernel reads exactly what Python fills in."""

import ctypes
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..problem import Layout, Problem
from ..problem.dtypes import dtype_name

MOST_OPERANDS = 8
"""The maximum number of operands after a and b that a launch can pass."""


def why_not_epilogue(problem: Problem, most: int, dtypes: Collection[torch.dtype]) -> str | None:
    """Return why a launch cannot pass the epilogue, or None: over ``most`` operands, other ``dtypes``, or float64 computation."""
    if problem.epilogue is None:
        return None
    operands, nodes = problem.epilogue.operands, problem.epilogue.nodes
    if len(operands) > most:
        return f"the epilogue has {len(operands)} operands, a launch passes at most {most}"
    for i, x in enumerate(operands):
        if x.dtype not in dtypes:
            return f"operand {i} of the epilogue is {dtype_name(x.dtype)}, expected one of {', '.join(map(dtype_name, dtypes))}"
    if problem.accumulator != torch.float64 and any(node.dtype == torch.float64 for node in nodes):
        return f"the epilogue computes in float64, this backend in {dtype_name(problem.epilogue_dtype)}"
    return None


class Strides(ctypes.Structure):
    """Distances between neighbours in elements. ``batch`` is the distance from one product to the next."""

    _fields_ = [("row", ctypes.c_longlong), ("col", ctypes.c_longlong), ("batch", ctypes.c_longlong)]


def strides_of(layout: Layout) -> Strides:
    """Return the strides of a matrix or a batch of matrices. For a batch of one the batch stride is 0."""
    batch = layout.stride[0] if len(layout.stride) == 3 and layout.size[0] > 1 else 0
    return Strides(*layout.stride[-2:], batch)


C_TYPES: dict[Any, str] = {
    ctypes.c_void_p: "void const*", ctypes.c_double: "double", ctypes.c_float: "float", ctypes.c_int: "int",
    ctypes.c_longlong: "long long", ctypes.c_bool: "bool",
}  # fmt: skip


def declared(name: str, kind: Any, types: Mapping[str, str]) -> str:
    """Return a field's declaration. ``types`` maps some field names to their C++ types."""
    many = issubclass(kind, ctypes.Array)
    one = kind._type_ if many else kind
    written = types.get(name) or C_TYPES.get(one) or one.__name__
    return f"{written} {name}{f'[{kind._length_}]' if many else ''};"


def struct_text(struct: type[ctypes.Structure], types: Mapping[str, str], name: str = "") -> str:
    """Return ``struct`` in C++, under its own name or ``name``. ``types`` maps names of pointer fields to their types."""
    name = name or struct.__name__
    lines = [f"  {declared(field, kind, types)}" for field, kind in fields_of(struct)]
    size = f'static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "the caller fills it");'
    return "\n".join([f"struct {name} {{", *lines, "};", size])


def fields_of(struct: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    """Return the names and types of the fields, those of the bases first."""
    bases = [base for base in reversed(struct.__mro__) if "_fields_" in base.__dict__]
    return [(field[0], field[1]) for base in bases for field in base.__dict__["_fields_"]]
