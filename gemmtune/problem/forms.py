"""Text and JSON forms of a Problem, and their readers."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import torch

from ..errors import InvalidProblemError
from ..foreign import LARGEST_INTEGER, shown
from .dtypes import dtype_name
from .epilogue import Epilogue, Node, Ref, evaluate
from .fields import ProblemFields, ScalarClass
from .layout import Layout
from .precision import InputMode, Precision
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
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        case _:
            return value


def fields_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the Problem of ``to_json``, without empty ones of another version. Raises as ``Problem.from_json``."""
    known = {field.name for field in dataclasses.fields(ProblemFields) if field.init}
    given = {name: value for name, value in data.items() if name not in DERIVED}
    for name in given.keys() - known:
        if given[name] not in (None, False, ""):
            raise InvalidProblemError(
                f"problem: the field {name} = {given[name]!r} is unknown to this version; use the version that wrote it"
            )
    for name, legal in _LEGAL.items():
        if name in given and given[name] not in legal:
            raise InvalidProblemError(f"problem: {name}: got {shown(given[name])}, expected one of {', '.join(map(str, legal))}")
    read = {"precision": _precision, "sparsity": _sparsity, "epilogue": _epilogue}
    return {
        name: read.get(name, _layout)(value) if isinstance(value, Mapping) else value
        for name, value in given.items()
        if name in known
    }


_LEGAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("alpha", "beta"), get_args(ScalarClass)), **dict.fromkeys(("prepacked", "fast_accum"), (False, True)),
}  # fmt: skip
"""Legal values of fields that ``rules.check`` takes as they are. Templates print some of them into sources."""


def _layout(data: Mapping[str, Any]) -> Layout:
    for name in ("size", "stride"):
        _check_integers(name, *data[name])
    _check_integers("offset", data["offset"])
    return Layout(size=tuple(data["size"]), stride=tuple(data["stride"]), dtype=_dtype(data["dtype"]), offset=data["offset"])


def _check_integers(name: str, *values: object) -> None:
    for value in values:
        if type(value) is not int or abs(value) > LARGEST_INTEGER:
            raise InvalidProblemError(f"problem: {name}: got {shown(value)}, expected whole numbers of at most 64 bits")


def _precision(data: Mapping[str, Any]) -> Precision:
    made = Precision(**data)
    if made.input_mode not in get_args(InputMode) or not isinstance(made.reduced_partials, bool):
        raise InvalidProblemError(f"problem: precision: got {shown(made)}, expected an input mode and true or false")
    return made


def _sparsity(data: Mapping[str, Any]) -> Sparsity:
    _check_integers("sides of blocks", data["block_n"], data["block_k"])
    return Sparsity(**data)


def _epilogue(data: Mapping[str, Any]) -> Epilogue:
    """Return the epilogue, whose graph must be one that ``trace`` can make: templates print its words into sources."""

    def argument(value: Any, below: int) -> Any:
        if isinstance(value, str) and value.startswith("%") and value[1:].isdecimal() and int(value[1:]) < below:
            return Ref(int(value[1:]))
        if type(value) not in (bool, int, float):
            raise InvalidProblemError(f"epilogue: got the argument {shown(value)}, expected a number or an earlier node such as %0")
        return value

    nodes: list[Node] = []
    for node in data["nodes"]:
        args = tuple(argument(value, len(nodes)) for value in node["args"])
        if node["op"] == "operand" and not (len(args) == 1 and args[0] in range(len(data["operands"]))):
            raise InvalidProblemError(f"epilogue: got the operand {shown(args)}, expected one of {len(data['operands'])}")
        nodes.append(Node(op=node["op"], args=args, dtype=_dtype(node["dtype"])))
    made = Epilogue(nodes=tuple(nodes), operands=tuple(_layout(layout) for layout in data["operands"]))
    operands = [torch.empty((1, 1), dtype=layout.dtype, device="meta") for layout in made.operands]
    try:
        evaluate(made, torch.empty((1, 1), device="meta"), operands)
    except Exception as error:  # torch raises many kinds
        raise InvalidProblemError(
            f"epilogue: got a graph that cannot be evaluated ({error}), expected one that was traced"
        ) from error
    return made


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidProblemError(f"problem: dtype: got {shown(name)}, expected the name of a dtype such as float32")
    return dtype
