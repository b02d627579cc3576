"""Horizontal fusion: GEMMs of a compiled graph with one input, whose weights lie next to each other, as one product."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...problem import Layout, Problem
from .addresses import Addresses, address_of, input_addresses
from .planned_join import gathered_roles
from .products import Product
from .tails import VIEWS

aten = torch.ops.aten
OPS = ("mm", "addmm", "mixed_mm")
_TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int, *VIEWS)
"""Nodes that make b of a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Products of one ``a`` with operands that are columns of one, in that order. ``problem`` is that of all columns."""

    products: tuple[Product, ...]
    problem: Problem

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each product."""
        return tuple(product.alone.n for product in self.products)

    @property
    def pieces(self) -> tuple[fx.Node, ...]:
        """Nodes of all operands but a, grouped by role."""
        return tuple(x for role in zip(*(product.tensors[1:] for product in self.products), strict=True) for x in role)


def joins_of(products: Sequence[Product]) -> list[Join]:
    """Return the joins among GEMMs of the graph that is being compiled."""
    alike: dict[Hashable, list[Product]] = {}
    known = input_addresses()
    for product in products:
        if (key := _key(product, known)) is not None:
            alike.setdefault(key, []).append(product)
    return [join for group in alike.values() for join in _joins(group, known)]


def is_given(node: fx.Node) -> bool:
    """Return whether a node is an input of the graph or a view of one, so that any place in the graph can read it."""
    while node.target in _TRANSPOSES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op in ("placeholder", "get_attr")


def _key(product: Product, known: Addresses) -> Hashable | None:
    """Return a key that is equal for GEMMs that may be joined: the same operation on the same a, with weights of one dtype."""
    alone = product.alone
    if alone.op not in OPS or product.dynamic or product.scalars != (1.0, 1.0) or not all(map(is_given, product.tensors[1:])):
        return None
    source = product.tensors[0]
    while source.target in VIEWS and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    b = product.tensors[1].meta["val"]
    if address_of(b, known) is None:
        return None
    return (alone.op, alone.encoding, source, alone.a, b.dtype, b.device, tuple(role for role, _ in alone.operands))


def _joins(group: Sequence[Product], known: Addresses) -> Iterator[Join]:
    """Yield runs of neighbours."""
    run: list[Product] = []
    for product in sorted(group, key=lambda product: address_of(product.tensors[1].meta["val"], known) or 0):
        if run and not _neighbours(run[-1], product, known):
            yield from _joined(run)
            run = []
        run.append(product)
    yield from _joined(run)


def _neighbours(left: Product, right: Product, known: Addresses) -> bool:
    """Return whether each operand of the second begins where that of the first ends, or can be gathered with it."""
    gathered = gathered_roles(left.alone)
    for (role, _), first, second in list(zip(left.alone.operands, left.tensors, right.tensors, strict=True))[1:]:
        x, y = first.meta["val"], second.meta["val"]
        if x.shape[:-1] != y.shape[:-1] or x.dtype != y.dtype or (x.shape[-1], y.shape[-1]) != (left.alone.n, right.alone.n):
            return False
        if role in gathered:
            if not (x.is_contiguous() and y.is_contiguous()):
                return False
            continue
        begin, end = address_of(y, known), address_of(x, known)
        if begin is None or end is None or begin != end + x.shape[-1] * x.stride(-1) * x.element_size():
            return False
        if any(size > 1 and s != t for size, s, t in zip(x.shape, x.stride(), y.stride(), strict=True)):
            return False
    return True


def _joined(run: Sequence[Product]) -> Iterator[Join]:
    if len(run) > 1:
        first = run[0].alone
        n, gathered = sum(product.alone.n for product in run), gathered_roles(first)
        fields: dict[str, Any] = {"out": Layout.contiguous((first.m, n), first.out.dtype)}
        for role, layout in first.operands:
            if role != "a":
                fields[role] = _widened(layout, n, gathered=role in gathered)
        yield Join(products=tuple(run), problem=dataclasses.replace(first, **fields))


def _widened(layout: Layout, n: int, *, gathered: bool) -> Layout:
    """Return the layout of the same rows with n columns. A single row has the stride that it has in a tensor of its own."""
    size = (*layout.size[:-1], n)
    whole = Layout.contiguous(size, layout.dtype)
    if gathered:
        return whole
    return dataclasses.replace(whole if size[:-1] == (1,) else dataclasses.replace(layout, size=size), offset=layout.offset)
