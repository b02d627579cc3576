"""Text and JSON forms of a Problem, and their readers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import InvalidProblemError
from .dtypes import dtype_name
from .epilogue import Epilogue, Node, Ref
from .fields import ProblemFields
from .layout import Layout
from .precision import Precision
from .sparsity import Sparsity

DERIVED = ("batch", "m", "n", "k", "k2")
"""Fields that ``Problem.to_json`` adds for human readers. ``fields_of`` ignores them."""


def describe(problem: ProblemFields) -> str:
    """Return a one-line description without strides, such as ``addmm 16x64x32 bfloat16 nt inp[64] alpha=one beta=one on cuda``."""
    p = problem
    shape = f"{p.batch}x" * p.batched + f"{p.m}x{p.n}x" + (f"{p.k}" if p.c is None else f"({p.k}+{p.k2})")
    parts = [p.op, shape, p.dtype_label, p.layout_letters]
    if p.inp is not None:
        parts += [f"inp[{'x'.join(map(str, p.inp.size))}]", f"alpha={p.alpha}", f"beta={p.beta}"]
    if p.encoding or p.b.dtype != p.a.dtype:
        parts.append(f"b {p.encoding or dtype_name(p.b.dtype)}")
    if p.float8:
        parts.append(f"out {dtype_name(p.out.dtype)}")
    parts += [f"{name}[{_block(p, name)}]" for name in ("scale_a", "scale_b", "zero_b") if getattr(p, name) is not None]
    parts += ["fast_accum"] * p.fast_accum
    parts += [f"{p.groups} groups"] if p.groups else []
    parts += [f"rows of {p.a.size[0]}"] if p.rows is not None else []
    parts += [f"gated by {p.gated}"] if p.gated else []
    parts += [f"{p.weights.size[1]} rows for each of {p.weights.size[0]} tokens"] if p.weights is not None else []
    parts += [str(p.sparsity)] if p.sparsity is not None else []
    if p.epilogue is not None:
        parts.append(f"epilogue={p.epilogue}")
    return " ".join([*parts, *(["prepacked"] * p.prepacked), "on", p.device_type])


def _block(problem: ProblemFields, name: str) -> str:
    """Return the block that one element of a scale covers: ``-`` for a whole dimension, ``1`` if the tensor has one scale."""
    layout: Layout = getattr(problem, name)
    if layout.numel == 1:
        return "1"
    size = (problem.m, problem.k) if name == "scale_a" else problem.b_size
    block = problem.scale_block(name)
    return "x".join("-" if side >= extent else str(side) for side, extent in zip(block, size, strict=True))


def plain(value: Any) -> Any:
    """Convert a value for JSON: dataclasses to mappings, tuples to lists, dtypes to names, references to nodes to ``%3``."""
    match value:
        case torch.dtype():
            return dtype_name(value)
        case Ref():
            return f"%{value.index}"
        case tuple():
            return [plain(v) for v in value]
        case _ if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        case _:
            return value


def fields_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the Problem whose ``to_json`` gave ``data``.

    Fields of another version are dropped if they are empty (None, False, ""). The exceptions are those of ``Problem.from_json``.
    """
    known = {field.name for field in dataclasses.fields(ProblemFields)}
    given = {name: value for name, value in data.items() if name not in DERIVED}
    for name in given.keys() - known:
        if given[name] not in (None, False, ""):
            raise InvalidProblemError(
                f"problem: the field {name} = {given[name]!r} is unknown to this version; use the version that wrote it"
            )
    read = {"precision": lambda value: Precision(**value), "sparsity": lambda value: Sparsity(**value), "epilogue": _epilogue}
    return {
        name: read.get(name, _layout)(value) if isinstance(value, Mapping) else value
        for name, value in given.items()
        if name in known
    }


def _layout(data: Mapping[str, Any]) -> Layout:
    return Layout(size=tuple(data["size"]), stride=tuple(data["stride"]), dtype=_dtype(data["dtype"]), offset=data["offset"])


def _epilogue(data: Mapping[str, Any]) -> Epilogue:
    def argument(value: Any) -> Any:
        is_reference = isinstance(value, str) and value.startswith("%")
        return Ref(int(value[1:])) if is_reference else value

    nodes = [Node(op=node["op"], args=tuple(map(argument, node["args"])), dtype=_dtype(node["dtype"])) for node in data["nodes"]]
    return Epilogue(nodes=tuple(nodes), operands=tuple(_layout(layout) for layout in data["operands"]))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
