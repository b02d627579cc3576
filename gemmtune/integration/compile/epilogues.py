"""Epilogue matching: the pointwise nodes that follow a GEMM in a compiled graph, translated into an Epilogue."""

import heapq
from collections.abc import Mapping, Sequence
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
"""Nodes that make a tensor of one number, with the position of that number among their arguments."""
_NAMES = frozenset({
    "neg", "abs", "exp", "sqrt", "rsqrt", "sigmoid", "tanh", "erf", "relu", "relu6", "silu", "gelu", "mul", "add", "sub", "rsub",
    "div", "pow", "reciprocal", "square", "lt", "le", "gt", "ge", "eq", "ne", "clamp", "clamp_min", "clamp_max", "hardtanh",
    "minimum", "maximum", "where", "leaky_relu",
})  # fmt: skip
"""Operators of ATen that equal the function of the same name in ``FUNCTIONS``."""
MOST_NODES = 64
"""Maximum nodes of one epilogue. Each value occupies registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpilogueOperand:
    """A node outside the region that the epilogue reads: a number (``rank`` 0), a row [N] (1), or a matrix shaped as the result.

    ``sizes`` is the shape that a view must give it first, with -1 for a size that is only known at run time. None means no view.
    """

    node: fx.Node
    rank: int
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpilogueMatch:
    """The pointwise nodes behind a GEMM whose only exit is ``last``, and their epilogue.

    ``operands`` are the operands of the epilogue, in its order. ``sizes`` is the shape of ``last``, as numbers and nodes, or None
    if it is the shape of the GEMM's result.
    """

    last: fx.Node
    nodes: tuple[Node, ...]
    operands: tuple[EpilogueOperand, ...]
    sizes: Sequence[Any] | None


@dataclass(slots=True)
class _Region:
    """The nodes computed from the GEMM. ``parts`` has the nodes behind each value, ``view_sizes`` the shape by its last view."""

    gemm: fx.Node
    parts: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    view_sizes: dict[fx.Node, Sequence[Any] | None] = field(default_factory=dict)

    def closed(self, last: fx.Node) -> bool:
        """Return True if no node outside reads the values behind ``last``, so that the GEMM's own result is not needed."""
        parts = self.parts[last]
        return all(user in parts for part in parts if part is not last for user in part.users)


def match_epilogue(gemm: fx.Node, order: Mapping[fx.Node, int]) -> EpilogueMatch | None:
    """Return the longest epilogue of a GEMM, or None if it has none. ``order`` is the place of each node in the graph."""
    region = _grown(gemm, order)
    for last in reversed(region.parts):
        if last is not gemm and last.target not in VIEWS and region.closed(last):
            match = _traced(region, last, order)
            if match is not None:
                return match
    return None


def _grown(gemm: fx.Node, order: Mapping[fx.Node, int]) -> _Region:
    """Return the region of all pointwise nodes that depend on the GEMM, visited in the order of the graph."""
    region = _Region(gemm, {gemm: frozenset((gemm,))}, {gemm: None})
    waiting: list[tuple[int, fx.Node]] = []
    seen: set[fx.Node] = set()

    def push_readers(node: fx.Node) -> None:
        for user in node.users:
            if user not in seen and user in order:
                seen.add(user)
                heapq.heappush(waiting, (order[user], user))

    push_readers(gemm)
    while waiting and len(region.parts) < MOST_NODES:
        _, node = heapq.heappop(waiting)
        if _fits(node, region):
            inside = [x for x in node.all_input_nodes if x in region.parts]
            region.parts[node] = frozenset((node,)).union(*(region.parts[x] for x in inside))
            viewed = (sizes for x in inside if (sizes := region.view_sizes[x]) is not None)
            region.view_sizes[node] = node.args[1] if node.target in VIEWS else next(viewed, None)  # type: ignore[assignment]
            push_readers(node)
    return region


def _fits(node: fx.Node, region: _Region) -> bool:
    """Return True if a node is a pointwise function of the region's values and of operands that an epilogue can read."""
    value, gemm = node.meta.get("val"), region.gemm.meta["val"]
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not _like(value, gemm):
        return False
    if node.target in VIEWS:
        return node.args[0] in region.parts
    if _name_of(node) is None or value.dtype not in (*DTYPES, torch.bool):
        return False
    return all(x in region.parts or constant(x) is not None or _operand_of(x, region) for x in node.all_input_nodes)


def _name_of(node: fx.Node) -> str | None:
    if node.target is CONVERT:
        return "to"
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return None
    name = node.target._schema.name.removeprefix("aten::")
    return name if name in _NAMES else None


def _like(value: torch.Tensor, gemm: torch.Tensor) -> bool:
    """Return True if a value has the elements of the GEMM's result in rows of the same length, under any leading dimensions."""
    return (
        value.dim() >= 2
        and statically_known_true(value.shape[-1] == gemm.shape[-1])
        and statically_known_true(value.numel() == gemm.numel())
        and value.is_contiguous()
    )


def _operand_of(node: fx.Node, region: _Region) -> EpilogueOperand | None:
    """Return a node outside the region as an operand, or None if it cannot be one. A row may have leading dimensions of 1."""
    value, gemm = node.meta.get("val"), region.gemm.meta["val"]
    if not isinstance(value, torch.Tensor) or value.device != gemm.device or value.dtype not in (*DTYPES, torch.bool):
        return None
    if value.dim() == 0 or same_shape(value, gemm.shape):
        return EpilogueOperand(node=node, rank=value.dim())
    inner = gemm.shape[1:]
    if _like(value, gemm):
        known = all(isinstance(size, int) for size in inner)
        return EpilogueOperand(node=node, rank=gemm.dim(), sizes=(-1, *map(int, inner))) if known else None
    length = gemm.shape[-1]
    if not (statically_known_true(value.shape[-1] == length) and statically_known_true(value.numel() == length)):
        return None
    if value.dim() == 1:
        return EpilogueOperand(node=node, rank=1)
    return EpilogueOperand(node=node, rank=1, sizes=(length,)) if isinstance(length, int) and value.is_contiguous() else None


def constant(node: fx.Node) -> float | int | bool | None:
    """Return the number from which a node makes a 0-D tensor, or None for another node."""
    place = _CONSTANTS.get(node.target)
    if place is None or node.meta["val"].dim() != 0:
        return None
    number = node.args[place]
    return number if isinstance(number, (int, float)) else None


def _traced(region: _Region, last: fx.Node, order: Mapping[fx.Node, int]) -> EpilogueMatch | None:
    """Return the epilogue that ends in ``last``, or None if ``FUNCTIONS`` lacks one of its nodes."""
    # Collect the operands that the nodes read from outside.
    members = sorted(region.parts[last], key=order.__getitem__)
    inputs = (x for node in members[1:] if node.target not in VIEWS for x in node.all_input_nodes)
    outside = dict.fromkeys(x for x in inputs if x not in region.parts and constant(x) is None)
    operands = tuple(operand for x in outside if (operand := _operand_of(x, region)) is not None)
    gemm = region.gemm.meta["val"]
    # Translate each node into a function of ours, and round the result as the graph does.
    samples = [torch.empty((1,) * x.rank, dtype=x.node.meta["val"].dtype, device="meta") for x in operands]
    builder = GraphBuilder(accumulator_dtype(gemm.dtype), samples)
    values: dict[fx.Node, Any] = {region.gemm: builder.acc, **dict(zip(outside, builder.operands, strict=True))}
    try:
        for node in members[1:]:
            values[node] = _value(builder, node, values)
        result = _rounded(builder, values[last], last.meta["val"].dtype, gemm.dtype)
    except (EpilogueError, TypeError, RuntimeError, ValueError):
        return None  # FUNCTIONS lacks this form, which Inductor compiles
    # Refuse an epilogue that does not read the product, gives booleans, or has an unknown shape.
    nodes = needed(builder.nodes, result)
    value = last.meta["val"]
    static = all(isinstance(size, int) for size in value.shape)
    same = same_shape(value, gemm.shape)
    sizes = None if same else list(value.shape) if static else region.view_sizes[last]
    lost = sizes is None and not same
    if nodes[0].op != "acc" or nodes[-1].dtype == torch.bool or lost:
        return None
    return EpilogueMatch(last=last, nodes=nodes, operands=operands, sizes=sizes)


def same_shape(value: torch.Tensor, size: Sequence[int | torch.SymInt]) -> bool:
    """Return True if the shape is ``size`` for all dynamic numbers. No guard is added."""
    return value.dim() == len(size) and all(statically_known_true(x == y) for x, y in zip(value.shape, size, strict=True))


def _value(builder: GraphBuilder, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Add a node to the epilogue's graph and return its value there."""

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
    """Return the result as ``dtype``, with a cast only if the operation's default would differ."""
    node = builder.nodes[value.index]
    if dtype != default:
        return value if node.op == "cast" and node.dtype == dtype else builder.cast(value, dtype)
    if node.op != "cast":
        return value
    source = node.args[0]
    assert isinstance(source, Ref)
    final = node.dtype == dtype and builder.nodes[source.index].op != "cast"
    return source if final else value if node.dtype == dtype else builder.cast(value, dtype)
