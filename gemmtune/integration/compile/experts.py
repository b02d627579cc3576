"""Changes around the grouped products of a compiled mixture of experts: the sort by experts, and the sum of a token's rows.

Both give the same numbers at less cost. A radix sort of 64-bit numbers makes eight passes, and one of bytes makes one. Inductor
compiles the sum over eight or more experts of a token as a reduction, whose threads each read from eight rows. Unrolled, which is
what it does with fewer experts, adjacent threads read adjacent elements.
"""

import functools
import operator
from collections.abc import Callable, Iterable

import torch
from torch import fx
from torch._inductor import config as inductor_config

from .epilogues import CONVERT, VIEWS
from .planned import SUM

aten = torch.ops.aten

MOST_EXPERTS = 32
"""Maximum experts of a token whose sum is unrolled. A thread holds one number of each expert."""
DEEPEST = 6
"""Maximum nodes between the offsets of the groups and the sort whose result they count."""
NARROW = ((2**7, torch.uint8), (2**15, torch.int16))
"""Number of experts, and a dtype for their indices whose highest bit stays 0."""
_BETWEEN = (*VIEWS, CONVERT, aten.where.self, aten.mul.Tensor, aten.index.Tensor)
"""Operators between a grouped product and the sum over a token's experts."""
_ASCENDING = ((), (-1,), (0,), (-1, False), (0, False))
"""Arguments of an ascending sort of a vector."""

Change = Callable[[], None]


def changes_around(products: Iterable[fx.Node]) -> list[Change]:
    """Return the changes around grouped products. The caller applies them when it has rewritten the products."""
    found: dict[fx.Node, Change] = {}
    for product in products:
        offs = next((x for x in product.all_input_nodes if _is_offsets(x)), None)
        if offs is None:
            continue
        sort = _sort_before(offs, DEEPEST)
        if sort is not None and (dtype := _narrow_type(sort)) is not None:
            found[sort] = functools.partial(_sort_narrowly, sort, dtype)
        if (total := _sum_behind(product)) is not None:
            found[total] = functools.partial(_unroll, total)
    return list(found.values())


def _is_offsets(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.int32 and value.dim() == 1


def _sort_before(node: fx.Node, depth: int) -> fx.Node | None:
    """Return the sort whose values a node is computed from, at most ``depth`` nodes before it."""
    if node.target is operator.getitem and node.args[1] == 0:
        source = node.args[0]
        return source if isinstance(source, fx.Node) and source.target is aten.sort.default else None
    if depth == 0:
        return None
    return next((sort for x in node.all_input_nodes if (sort := _sort_before(x, depth - 1)) is not None), None)


def _narrow_type(sort: fx.Node) -> torch.dtype | None:
    """Return a narrow dtype for the sorted numbers if they are indices of experts from topk, or None."""
    numbers = sort.args[0]
    while isinstance(numbers, fx.Node) and numbers.target in VIEWS:
        numbers = numbers.args[0]
    if not isinstance(numbers, fx.Node) or numbers.target is not operator.getitem or numbers.args[1] != 1:
        return None
    chosen = numbers.args[0]
    if (
        not isinstance(chosen, fx.Node)
        or chosen.target is not aten.topk.default
        or chosen.kwargs
        or chosen.args[2:3] not in ((), (-1,))
    ):
        return None
    if sort.args[1:] not in _ASCENDING or sort.kwargs:
        return None
    experts = chosen.args[0].meta["val"].shape[-1]  # type: ignore[union-attr]
    return next((dtype for most, dtype in NARROW if isinstance(experts, int) and experts <= most), None)


def _sort_narrowly(sort: fx.Node, dtype: torch.dtype) -> None:
    """Replace a sort by one of numbers in ``dtype``, whose values are converted back."""
    graph, (numbers, *way) = sort.graph, sort.args
    values, places = sort.meta["val"]
    with graph.inserting_before(sort):
        narrow = _call(graph, CONVERT, (numbers, dtype), values.to(dtype))
        new = _call(graph, aten.sort.default, (narrow, *way), (values.to(dtype), places))
        narrow_values = _call(graph, operator.getitem, (new, 0), values.to(dtype))
        made = (_call(graph, CONVERT, (narrow_values, values.dtype), values), _call(graph, operator.getitem, (new, 1), places))
    for user in list(sort.users):
        user.replace_all_uses_with(made[user.args[1]])  # type: ignore[index]


def _sum_behind(product: fx.Node) -> fx.Node | None:
    """Return the sum over each token's rows if it alone reads a product, weighted and gathered into the order of the tokens."""
    node, gathered = product, False
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.target is aten.sum.dim_IntList:
            return user if gathered and _is_unrollable(user) else None
        if user.target not in _BETWEEN or (user.target is aten.index.Tensor and user.args[0] is not node):
            return None
        node, gathered = user, gathered or user.target is aten.index.Tensor
    return None


def _is_unrollable(total: fx.Node) -> bool:
    """Return True for a sum over dimension 1 of 3 that is small enough to unroll, and that Inductor does not unroll by default."""
    value = total.args[0].meta["val"]  # type: ignore[union-attr]
    if value.dim() != 3 or not value.is_floating_point() or total.args[1:] != ([1],) or total.kwargs:
        return False
    return isinstance(value.shape[1], int) and inductor_config.unroll_reductions_threshold <= value.shape[1] <= MOST_EXPERTS


def _unroll(total: fx.Node) -> None:
    """Replace a sum by the operator whose lowering unrolls it."""
    with total.graph.inserting_before(total):
        total.replace_all_uses_with(_call(total.graph, SUM, total.args[:1], total.meta["val"]))


def _call(graph: fx.Graph, target: Callable[..., object], args: tuple[object, ...], value: object) -> fx.Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta["val"] = value
    return node
