"""Pointwise nodes of a compiled graph as an epilogue: the region behind a GEMM, and its graph in our own terms."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...errors import EpilogueError
from ...problem.dtypes import DTYPES, accumulator_dtype
from ...problem.epilogue import Node, Ref
from ...problem.functions import FUNCTIONS, GraphBuilder
from ...problem.trace import needed

aten, prims = torch.ops.aten, torch.ops.prims

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
CONVERT = prims.convert_element_type.default
_CONSTANTS: dict[Any, int] = {aten.full.default: 1, aten.scalar_tensor.default: 0}
"""Nodes that make a tensor of one number: where the number stands among their arguments."""
_NAMES = frozenset({
    "neg", "abs", "exp", "sqrt", "rsqrt", "sigmoid", "tanh", "erf", "relu", "relu6", "silu", "gelu", "mul", "add", "sub", "rsub",
    "div", "pow", "reciprocal", "square", "lt", "le", "gt", "ge", "eq", "ne", "clamp", "clamp_min", "clamp_max", "hardtanh",
    "minimum", "maximum", "where", "leaky_relu",
})  # fmt: skip
"""Operators of ATen that are the function of that name in ``FUNCTIONS``."""
MOST_NODES = 64
"""More in one epilogue would cost registers without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """A node outside of the region that an epilogue reads: a number (``rank`` 0), a row of N (1), or a matrix like the result.

    ``sizes`` are those that a view has to give it before, -1 among them for a size that only the run tells; None if none has to.
    """

    node: fx.Node
    rank: int
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The pointwise nodes behind a GEMM whose only exit is ``last``, and their graph.

    ``extra`` are the operands of the graph, in its order. ``sizes`` are those of the value of ``last``, numbers and nodes, or None
    where it has the shape of the GEMM's result.
    """

    last: fx.Node
    nodes: tuple[Node, ...]
    extra: tuple[Extra, ...]
    sizes: Sequence[Any] | None


@dataclass(slots=True)
class _Region:
    """Nodes computed from the GEMM so far: each with those that it is made of, and the sizes that the last view gave it."""

    gemm: fx.Node
    parts: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    view_sizes: dict[fx.Node, Sequence[Any] | None] = field(default_factory=dict)

    def closed(self, last: fx.Node) -> bool:
        """Nobody outside reads what ``last`` is made of: the GEMM's own result is not needed then."""
        parts = self.parts[last]
        return all(user in parts for part in parts if part is not last for user in part.users)


def tail_of(gemm: fx.Node, order: Mapping[fx.Node, int]) -> Tail | None:
    """The longest tail of a GEMM, None if no pointwise node alone reads it. ``order`` is the place of each node in the graph."""
    region = _grown(gemm, order)
    for last in reversed(region.parts):
        if last is not gemm and last.target not in VIEWS and region.closed(last):
            tail = _traced(region, last, order)
            if tail is not None:
                return tail
    return None


def _grown(gemm: fx.Node, order: Mapping[fx.Node, int]) -> _Region:
    region = _Region(gemm, {gemm: frozenset((gemm,))}, {gemm: None})
    waiting: list[tuple[int, fx.Node]] = []
    seen: set[fx.Node] = set()

    def look_at_readers(node: fx.Node) -> None:
        for user in node.users:
            if user not in seen and user in order:
                seen.add(user)
                heapq.heappush(waiting, (order[user], user))

    look_at_readers(gemm)
    while waiting and len(region.parts) < MOST_NODES:
        _, node = heapq.heappop(waiting)
        if _fits(node, region):
            inside = [x for x in node.all_input_nodes if x in region.parts]
            region.parts[node] = frozenset((node,)).union(*(region.parts[x] for x in inside))
            viewed = (sizes for x in inside if (sizes := region.view_sizes[x]) is not None)
            region.view_sizes[node] = node.args[1] if node.target in VIEWS else next(viewed, None)  # type: ignore[assignment]
            look_at_readers(node)
    return region


def _fits(node: fx.Node, region: _Region) -> bool:
    """Whether a node is a pointwise function of the region's values and of operands that an epilogue can read."""
    value, gemm = node.meta.get("val"), region.gemm.meta["val"]
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not _like(value, gemm):
        return False
    if node.target in VIEWS:
        return node.args[0] in region.parts
    if _name_of(node) is None or value.dtype not in (*DTYPES, torch.bool):
        return False
    return all(x in region.parts or constant(x) is not None or _extra(x, region) for x in node.all_input_nodes)


def _name_of(node: fx.Node) -> str | None:
    if node.target is CONVERT:
        return "to"
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return None
    name = node.target._schema.name.removeprefix("aten::")
    return name if name in _NAMES else None


def _like(value: torch.Tensor, gemm: torch.Tensor) -> bool:
    """Whether a value has the elements of the GEMM's result in rows of the same length, perhaps with its rows in a grid."""
    return (
        value.dim() >= 2
        and statically_known_true(value.shape[-1] == gemm.shape[-1])
        and statically_known_true(value.numel() == gemm.numel())
        and value.is_contiguous()
    )


def _extra(node: fx.Node, region: _Region) -> Extra | None:
    """A node outside as an operand of the epilogue, None if it cannot be one. Rows may have leading dimensions of one."""
    value, gemm = node.meta.get("val"), region.gemm.meta["val"]
    if not isinstance(value, torch.Tensor) or value.device != gemm.device or value.dtype not in (*DTYPES, torch.bool):
        return None
    if value.dim() == 0 or _same_shape(value, gemm):
        return Extra(node=node, rank=value.dim())
    inner = gemm.shape[1:]
    if _like(value, gemm):
        known = all(isinstance(size, int) for size in inner)
        return Extra(node=node, rank=gemm.dim(), sizes=(-1, *map(int, inner))) if known else None
    length = gemm.shape[-1]
    if not (statically_known_true(value.shape[-1] == length) and statically_known_true(value.numel() == length)):
        return None
    if value.dim() == 1:
        return Extra(node=node, rank=1)
    return Extra(node=node, rank=1, sizes=(length,)) if isinstance(length, int) and value.is_contiguous() else None


def constant(node: fx.Node) -> float | int | bool | None:
    """The number of a node that makes a 0-D tensor of it, else None."""
    place = _CONSTANTS.get(node.target)
    if place is None or node.meta["val"].dim() != 0:
        return None
    number = node.args[place]
    return number if isinstance(number, (int, float)) else None


def _traced(region: _Region, last: fx.Node, order: Mapping[fx.Node, int]) -> Tail | None:
    """The tail that ends in ``last``; None where a node of it has no equal among our functions."""
    members = sorted(region.parts[last], key=order.__getitem__)
    outside = dict.fromkeys(x for node in members[1:] for x in _operands(node, region))
    extra = tuple(operand for x in outside if (operand := _extra(x, region)) is not None)
    gemm = region.gemm.meta["val"]
    samples = [torch.empty((1,) * x.rank, dtype=x.node.meta["val"].dtype, device="meta") for x in extra]
    builder = GraphBuilder(accumulator_dtype(gemm.dtype), samples)
    values: dict[fx.Node, Any] = {region.gemm: builder.acc, **dict(zip(outside, builder.operands, strict=True))}
    try:
        for node in members[1:]:
            values[node] = _value(builder, node, values)
        result = _rounded(builder, values[last], last.meta["val"].dtype, gemm.dtype)
    except (EpilogueError, TypeError, RuntimeError, ValueError):
        return None  # what FUNCTIONS does not have in this form stays Inductor's
    nodes = needed(builder.nodes, result)
    value = last.meta["val"]
    sizes = None if _same_shape(value, gemm) else _sizes_of(value) or region.view_sizes[last]
    lost = sizes is None and not _same_shape(value, gemm)
    if nodes[0].op != "acc" or nodes[-1].dtype == torch.bool or lost:
        return None
    return Tail(last=last, nodes=nodes, extra=extra, sizes=sizes)


def _same_shape(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two values are known to have the same sizes."""
    return x.dim() == y.dim() and all(statically_known_true(m == n) for m, n in zip(x.shape, y.shape, strict=True))


def _sizes_of(value: torch.Tensor) -> list[int] | None:
    return [int(size) for size in value.shape] if all(isinstance(size, int) for size in value.shape) else None


def _operands(node: fx.Node, region: _Region) -> Iterator[fx.Node]:
    if node.target not in VIEWS:
        yield from (x for x in node.all_input_nodes if x not in region.parts and constant(x) is None)


def _value(builder: GraphBuilder, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    def argument(x: Any) -> Any:
        if not isinstance(x, fx.Node):
            return x
        return values[x] if x in values else constant(x)

    if node.target in VIEWS:
        return argument(node.args[0])
    args, kwargs = [argument(x) for x in node.args], {name: argument(x) for name, x in node.kwargs.items()}
    if node.target is CONVERT:
        source, dtype = args
        return source if builder.dtype(source) == dtype else builder.cast(source, dtype)
    name = _name_of(node)
    assert name is not None
    return FUNCTIONS[name](builder, *args, **kwargs)


def _rounded(builder: GraphBuilder, value: Ref, dtype: torch.dtype, default: torch.dtype) -> Ref:
    """The result as ``dtype``: written as a cast only where the operation would give another one by itself."""
    node = builder.nodes[value.index]
    if dtype != default:
        return value if node.op == "cast" and node.dtype == dtype else builder.cast(value, dtype)
    if node.op != "cast":
        return value
    source = node.args[0]
    assert isinstance(source, Ref)
    final = node.dtype == dtype and builder.nodes[source.index].op != "cast"
    return source if final else value if node.dtype == dtype else builder.cast(value, dtype)
