"""SwiGLU behind a grouped product in a compiled mixture of experts: silu(first half of the columns) · second half."""

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ...problem import Layout, Problem
from .epilogues import CONVERT, constant

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class SwigluMatch:
    """A product whose columns are gated, up to the node ``last``.

    ``masked`` is where(mask, 0, product) between them, which sets rows to zero. It has the same effect behind ``last``.
    """

    last: fx.Node
    masked: fx.Node | None


def match_swiglu(gemm: fx.Node) -> SwigluMatch | None:
    """Return the SwiGLU behind a product, or None if there is none or another node reads a value in between."""
    # Skip a mask between the product and its gates.
    product, masked = gemm, None
    if (user := _only_user(gemm)) is not None and user.target is aten.where.self and user.args[2] is gemm:
        rows = user.args[0].meta["val"]  # type: ignore[union-attr]
        if isinstance(user.args[1], fx.Node) and constant(user.args[1]) == 0 and rows.dim() == 2 and rows.shape[1] == 1:
            product, masked = user, user
    # Find silu(gates) · others.
    halves = _halves(product)
    if halves is None:
        return None
    gates, others = halves
    for last in _products_of(others):
        left, right = (_unconverted(x) for x in last.args[:2])
        act = last.args[1] if left is others else last.args[0] if right is others else None
        seen = {last, *_conversions(last)}
        if isinstance(act, fx.Node) and _silu(act, gates, seen) and _closed(gates, seen) and _closed(others, seen):
            end = _rounded(last, gemm.meta["val"].dtype)
            return None if end is None else SwigluMatch(last=end, masked=masked)
    return None


def gated_problem(alone: Problem) -> Problem:
    """Return the Problem of the product with gated columns."""
    out = Layout.contiguous((alone.m, alone.n // 2), alone.out.dtype)
    return replace(alone, op="routed_grouped_mm", out=out, gated="silu")


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _halves(product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the two halves of the columns, or None if anything else of the product is read."""
    width = product.meta["val"].shape[-1]
    if not isinstance(width, int) or width % 2:
        return None
    split = _only_user(product)
    if split is not None and split.target is aten.split.Tensor and split.args[1] == width // 2 and split.args[2:] in ((-1,), (1,)):
        found = {user.args[1]: user for user in split.users if user.target is operator.getitem}
        return (found[0], found[1]) if found.keys() == {0, 1} and len(split.users) == 2 else None
    sliced: dict[Any, fx.Node] = {}
    for user in product.users:
        if user.target is not aten.slice.Tensor or user.args[1] not in (1, -1) or len(user.args) != 4:
            return None
        _, _, begin, end = user.args
        sliced[begin, min(end, width)] = user  # type: ignore[type-var]
    wanted = [(0, width // 2), (width // 2, width)]
    return (sliced[wanted[0]], sliced[wanted[1]]) if sliced.keys() == set(wanted) and len(product.users) == 2 else None


def _products_of(node: fx.Node) -> list[fx.Node]:
    """Return the multiplications that read a node or a conversion of it."""
    readers = [user for x in (node, *(y for y in node.users if y.target is CONVERT)) for user in x.users]
    return [user for user in readers if user.target is aten.mul.Tensor]


def _unconverted(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target is CONVERT:
        node = node.args[0]
    return node


def _conversions(node: fx.Node) -> set[fx.Node]:
    """Return the dtype conversions between a node and the values it is computed from."""
    found: set[fx.Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        source = waiting.pop()
        if source.target is CONVERT:
            found.add(source)
            waiting += source.all_input_nodes
    return found


def _silu(value: fx.Node, gates: fx.Node, seen: set[fx.Node]) -> bool:
    """Return True if a value is silu(gates), as one node or as torch decomposes it. Its nodes are added to ``seen``."""
    node = _unconverted(value)

    def is_gates(x: Any) -> bool:
        return _unconverted(x) is gates

    def add(*nodes: Any) -> bool:
        for x in nodes:
            seen.update({x, *_conversions(x)})
        return True

    if node.target is aten.silu.default and is_gates(node.args[0]):
        return add(node)
    if node.target is aten.div.Tensor and is_gates(node.args[0]) and isinstance(one := _unconverted(node.args[1]), fx.Node):
        exp = _unconverted(one.args[0]) if one.target is aten.add.Tensor and one.args[1:] == (1,) else None
        neg = _unconverted(exp.args[0]) if isinstance(exp, fx.Node) and exp.target is aten.exp.default else None
        return isinstance(neg, fx.Node) and neg.target is aten.neg.default and is_gates(neg.args[0]) and add(node, one, exp, neg)
    if node.target is aten.mul.Tensor:
        for x, other in (node.args[:2], node.args[1::-1]):
            sigmoid = _unconverted(other)
            if (
                is_gates(x)
                and isinstance(sigmoid, fx.Node)
                and sigmoid.target is aten.sigmoid.default
                and is_gates(sigmoid.args[0])
            ):
                return add(node, sigmoid)
    return False


def _closed(half: fx.Node, seen: set[fx.Node]) -> bool:
    """Return True if only nodes of ``seen`` read this half of the columns and the values between it and the result."""
    inner = [half, *(node for node in seen if node.target is CONVERT or node.target is not aten.mul.Tensor)]
    return all(user in seen for node in inner for user in node.users)


def _rounded(last: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """Return the gated value in the grouped product's dtype: the node itself, or the conversion that alone reads it."""
    if last.meta["val"].dtype == dtype:
        return last
    user = _only_user(last)
    return user if user is not None and user.target is CONVERT and user.meta["val"].dtype == dtype else None
