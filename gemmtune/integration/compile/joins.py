"""GEMMs of a compiled graph that read the same input, and whose weights lie next to each other: what one product can do."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from ...problem import Layout, Problem
from .products import Product
from .tails import VIEWS

aten = torch.ops.aten
OPS = ("mm", "addmm", "mixed_mm")
_TURNS = (aten.permute.default, aten.t.default, aten.transpose.int, *VIEWS)
"""Nodes that make b of a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Products of one ``a`` with operands that are columns of one in memory, in that order; ``problem`` is that of all columns."""

    products: tuple[Product, ...]
    problem: Problem

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of each."""
        return tuple(product.alone.n for product in self.products)

    @property
    def pieces(self) -> tuple[fx.Node, ...]:
        """The nodes of all operands but a: by role those of each product."""
        return tuple(x for role in zip(*(product.tensors[1:] for product in self.products), strict=True) for x in role)


def joins_of(products: Sequence[Product]) -> list[Join]:
    """The joins among GEMMs of a graph."""
    alike: dict[Hashable, list[Product]] = {}
    for product in products:
        if (key := _key(product)) is not None:
            alike.setdefault(key, []).append(product)
    return [join for group in alike.values() for join in _joins(group)]


def is_given(node: fx.Node) -> bool:
    """It is an input of the graph, or a view of one, and so can be read anywhere in it."""
    while node.target in _TURNS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op in ("placeholder", "get_attr")


def _key(product: Product) -> Hashable | None:
    """Equal for GEMMs that may be joined: the same operation on the same a, with weights in the same memory."""
    alone = product.alone
    if alone.op not in OPS or product.dynamic or product.scalars != (1.0, 1.0) or not all(map(is_given, product.tensors[1:])):
        return None
    source = product.tensors[0]
    while source.target in VIEWS and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    b = product.tensors[1].meta["val"]
    return (alone.op, alone.encoding, source, alone.a, b.dtype, tuple(role for role, _ in alone.operands), _memory(b))


def _joins(group: Sequence[Product]) -> Iterator[Join]:
    """Runs of neighbours."""
    run: list[Product] = []
    for product in sorted(group, key=lambda product: _values(product)[0].storage_offset()):
        if run and not _neighbours(run[-1], product):
            yield from _joined(run)
            run = []
        run.append(product)
    yield from _joined(run)


def _values(product: Product) -> list[torch.Tensor]:
    """The operands but a."""
    return [node.meta["val"] for node in product.tensors[1:]]


def _memory(x: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


def _neighbours(left: Product, right: Product) -> bool:
    """Whether each operand of the second begins where that of the first ends."""
    for x, y in zip(_values(left), _values(right), strict=True):
        if x.shape[:-1] != y.shape[:-1] or x.stride() != y.stride() or x.dtype != y.dtype:
            return False
        if _memory(x) != _memory(y):
            return False
        if (x.shape[-1], y.shape[-1]) != (left.alone.n, right.alone.n):
            return False
        if y.storage_offset() != x.storage_offset() + x.shape[-1] * x.stride(-1):
            return False
    return True


def _joined(run: Sequence[Product]) -> Iterator[Join]:
    if len(run) > 1:
        first = run[0].alone
        n = sum(product.alone.n for product in run)
        fields: dict[str, Any] = {"out": Layout.contiguous((first.m, n), first.out.dtype)}
        for role, layout in first.operands:
            if role != "a":
                fields[role] = dataclasses.replace(layout, size=(*layout.size[:-1], n))
        yield Join(products=tuple(run), problem=dataclasses.replace(first, **fields))
