"""GEMMs of a compiled graph as Problems: which nodes are products, and what each asks for with and without the tail behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...errors import InvalidProblemError
from ...problem import Epilogue, Layout, Problem, precision_of
from ...problem.dtypes import DTYPES
from ...problem.fields import scalar_class
from ...problem.layout import ALIGNED_BYTES
from .tails import CONVERT, VIEWS, Extra, Tail, tail_of

__all__ = ["PRODUCTS", "Product", "product_of"]

aten = torch.ops.aten

PRODUCTS: dict[Any, tuple[str, tuple[str, ...]]] = {
    aten.mm.default: ("mm", ("a", "b")),
    aten.addmm.default: ("addmm", ("inp", "a", "b")),
    aten.bmm.default: ("bmm", ("a", "b")),
    aten.baddbmm.default: ("baddbmm", ("inp", "a", "b")),
}
"""Operators of torch: the operation that they are, and the roles of their first arguments."""
_REDUCTIONS = frozenset({
    "mean", "sum", "amax", "amin", "max", "min", "var_mean", "var", "prod", "_softmax", "native_layer_norm", "argmax", "logsumexp",
})  # fmt: skip
_STEPS = 32
"""How many pointwise nodes are looked at on the way from a tail to a reduction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A GEMM of the graph.

    ``alone`` is its Problem; ``fused`` that with ``tail`` as its epilogue, None where there is no tail. For a graph with dynamic
    sizes these have the sizes of the example, and ``dynamic`` is set. ``tensors`` are the nodes of ``alone.operands``.
    ``before_reduction`` tells that a reduction follows the tail, into which Inductor would take it for nothing.
    """

    gemm: fx.Node
    alone: Problem
    fused: Problem | None
    tail: Tail | None
    tensors: tuple[fx.Node, ...]
    scalars: tuple[float, float]
    dynamic: bool
    before_reduction: bool

    @property
    def shape(self) -> str:
        """B×M×N×K, dynamic sizes by their names."""
        value, a = self.gemm.meta["val"], self.tensors[0].meta["val"]
        return "x".join(str(size) for size in (*value.shape, a.shape[-1]))


def product_of(node: fx.Node, order: Mapping[fx.Node, int]) -> Product | str:
    """The GEMM that a node of the table is, or why it is left to torch."""
    op, roles = PRODUCTS[node.target]
    nodes = dict(zip(roles, node.args, strict=False))
    values = {role: x.meta.get("val") for role, x in nodes.items() if isinstance(x, fx.Node)}
    a, out = values.get("a"), node.meta["val"]
    if not isinstance(a, torch.Tensor) or a.device.type not in ("cpu", "cuda"):
        return "its operands are on another device"
    if a.dtype not in DTYPES or node.kwargs.keys() - {"alpha", "beta"}:
        return f"torch has products of {a.dtype}, and with {', '.join(node.kwargs) or 'no keywords'}, alone"
    scalars = (node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1))
    if not all(isinstance(x, (int, float)) for x in scalars):
        return "alpha or beta is only known when it runs"
    fields = {role: _layout(value) for role, value in values.items() if isinstance(value, torch.Tensor)}
    if any(layout is None for layout in fields.values()) or (result := _layout(out)) is None:
        return "its sizes are only known when it runs"
    if "inp" in fields:
        fields |= {"alpha": scalar_class(scalars[0]), "beta": scalar_class(scalars[1])}  # type: ignore[dict-item,arg-type]
    result = Layout.contiguous(result.size, result.dtype)
    if 0 in (*result.size, a.shape[-1]):
        return "nothing to multiply"
    try:
        alone = Problem(op=op, out=result, device_type=a.device.type, precision=precision_of(a.dtype, a.device.type), **fields)  # type: ignore[arg-type]
        tail = tail_of(node, order)
        fused = None if tail is None else _with_tail(alone, tail)
    except InvalidProblemError as error:
        return str(error)
    return Product(
        gemm=node,
        alone=alone,
        fused=fused,
        tail=tail,
        tensors=tuple(nodes[role] for role, _ in alone.operands),  # type: ignore[misc]
        scalars=(float(scalars[0]), float(scalars[1])),  # type: ignore[arg-type]
        dynamic=any(isinstance(size, torch.SymInt) for size in (*out.shape, *a.shape)),
        before_reduction=tail is not None and _reduction_follows(tail.last),
    )


def _with_tail(alone: Problem, tail: Tail) -> Problem:
    layouts = [_operand_layout(x, alone) for x in tail.extra]
    epilogue = Epilogue(nodes=tail.nodes, operands=tuple(layouts))
    out = Layout.contiguous(alone.out.size, epilogue.result_dtype or alone.out.dtype)
    return dataclasses.replace(alone, out=out, epilogue=epilogue)


def _operand_layout(extra: Extra, problem: Problem) -> Layout:
    """As the rewritten graph hands it over."""
    layout = _layout(extra.node.meta["val"])
    if layout is None:
        raise InvalidProblemError("the sizes of an operand of its tail are only known when it runs")
    if extra.sizes is None:
        return layout
    size = problem.out.size if extra.rank > 1 else (problem.n,)
    return dataclasses.replace(Layout.contiguous(size, layout.dtype), offset=layout.offset)


def _layout(value: torch.Tensor) -> Layout | None:
    """The layout that the compiler knows, sizes that are symbols by their example; None where there is none."""
    numbers = [*map(_number, value.shape), *map(_number, value.stride()), _number(value.storage_offset())]
    if None in numbers:
        return None
    rank = value.dim()
    return Layout(
        size=tuple(numbers[:rank]),  # type: ignore[arg-type]
        stride=tuple(numbers[rank:-1]),  # type: ignore[arg-type]
        dtype=value.dtype,
        offset=numbers[-1] % max(1, ALIGNED_BYTES // value.element_size()),  # type: ignore[operator]
    )


def _number(size: int | torch.SymInt) -> int | None:
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if isinstance(hint, int) else None


def _reduction_follows(node: fx.Node) -> bool:
    """Whether a reduction reads the node's value, perhaps through pointwise nodes that Inductor fuses with it."""
    waiting, seen = [node], {node}
    while waiting and len(seen) < _STEPS:
        for user in waiting.pop().users:
            name = user.target._schema.name.rpartition("::")[2] if isinstance(user.target, torch._ops.OpOverload) else ""
            if name in _REDUCTIONS:
                return True
            passes = user.target in (*VIEWS, CONVERT) or torch.Tag.pointwise in getattr(user.target, "tags", ())
            if passes and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False
