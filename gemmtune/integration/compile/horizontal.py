"""Horizontal fusion: GEMMs of a compiled graph that share an input, and whose weights are adjacent in memory, as one product.

The graph has fake tensors. The addresses come from the real inputs for which Dynamo traced it.
"""

import dataclasses
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ...operators.schema import NAMESPACE
from ...problem import Layout, Problem
from ..adjacent import adjacent_runs
from .epilogues import CONVERT, VIEWS
from .planned_horizontal import gathered_roles
from .products import Product

aten = torch.ops.aten
OPS = ("mm", "addmm", "mixed_mm")
_TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int, *VIEWS)
"""Operators between a weight and the operand b."""
Addresses = Mapping[StorageWeakRef, int]
"""Addresses of real storages, by the storage of the fake tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizontalFusion:
    """Products of one ``a`` whose other operands follow each other in memory, in this order. ``problem`` has all their columns."""

    products: tuple[Product, ...]
    problem: Problem

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of columns of each product."""
        return tuple(product.alone.n for product in self.products)

    @property
    def dynamic(self) -> bool:
        """True if M is a symbol. ``problem`` then has the M of the example."""
        return self.products[0].dynamic

    @property
    def device(self) -> torch.device:
        """The device of the products."""
        device: torch.device = self.products[0].gemm.meta["val"].device
        return device

    @property
    def pieces(self) -> tuple[fx.Node, ...]:
        """The nodes of all operands except a, grouped by role."""
        return tuple(x for role in zip(*(product.tensors[1:] for product in self.products), strict=True) for x in role)


def find_horizontal_fusions(products: Sequence[Product]) -> list[HorizontalFusion]:
    """Return the horizontal fusions among the GEMMs of the graph that is being compiled."""
    alike: dict[Hashable, list[Product]] = {}
    known = {storage_of(fake): real.untyped_storage().data_ptr() for real, fake in real_inputs()}
    for product in products:
        if (key := _key(product, known)) is not None:
            alike.setdefault(key, []).append(product)
    return [fusion for group in alike.values() for fusion in _runs(group, known)]


def is_graph_input(node: fx.Node) -> bool:
    """Return True if a node is an input of the graph or a view of one, which every node of the graph can read."""
    while node.target in _TRANSPOSES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op in ("placeholder", "get_attr")


def leaves_graph(node: fx.Node) -> bool:
    """Return True if a node's result, or an alias of it, is an output of the graph, or an input of an operator of others.

    Such an operator may return its input, keep it, or read memory by strides that are constants of the graph.
    """
    waiting, seen = [node], {node}
    while waiting:
        source = waiting.pop()
        for user in source.users:
            if user.target is not operator.getitem and not _is_torchs(user.target):
                return True
            if user not in seen and _may_alias(user, source):
                seen.add(user)
                waiting.append(user)
    return False


def _is_torchs(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims", NAMESPACE)


def _may_alias(user: fx.Node, source: fx.Node) -> bool:
    """Return True if the result of ``user`` can share memory with ``source``, by its schema or because nothing is to be done."""
    if user.target is CONVERT:
        return bool(user.meta["val"].dtype == source.meta["val"].dtype)
    if user.target is operator.getitem or user.target in VIEWS:
        return True
    arguments = user.target._schema.arguments  # type: ignore[union-attr]
    given = [*zip((x.name for x in arguments), user.args, strict=False), *user.kwargs.items()]
    aliased = {x.name for x in arguments if x.alias_info is not None}
    return any(name in aliased and source in tree_leaves(value) for name, value in given)


def _key(product: Product, known: Addresses) -> Hashable | None:
    """Return a key that is equal for GEMMs that may be fused: the same operation on the same a, with weights of one dtype."""
    alone = product.alone
    if alone.op not in OPS or product.scalars != (1.0, 1.0) or not all(map(is_graph_input, product.tensors[1:])):
        return None
    if leaves_graph(product.gemm):  # as columns of a joined result it would have other strides, and keep all of its memory
        return None
    source = product.tensors[0]
    while source.target in VIEWS and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    b = product.tensors[1].meta["val"]
    if address_of(b, known) is None:
        return None
    roles = tuple(role for role, _ in alone.operands)
    return (alone.op, alone.encoding, source, alone.a, product.dynamic, b.dtype, b.device, roles)


def _runs(group: Sequence[Product], known: Addresses) -> Iterator[HorizontalFusion]:
    """Return a fusion for each run of products whose weights are adjacent."""
    ordered = sorted(group, key=lambda product: address_of(product.tensors[1].meta["val"], known) or 0)
    return map(_fused, adjacent_runs(ordered, lambda x, y: _adjacent(x, y, known)))


def into_columns(nodes: Sequence[fx.Node], whole: fx.Node, widths: Sequence[int]) -> None:
    """Replace nodes by the columns of one that has them all, at the graph's place of insertion."""
    graph, value, begin = whole.graph, whole.meta["val"], 0
    for node, width in zip(nodes, widths, strict=True):
        columns = graph.call_function(aten.slice.Tensor, (whole, value.dim() - 1, begin, begin + width))
        columns.meta["val"] = value[..., begin : begin + width]
        node.replace_all_uses_with(columns)
        begin += width
    for node in nodes:
        graph.erase_node(node)


def _adjacent(left: Product, right: Product, known: Addresses) -> bool:
    """Return True if each operand of the right product begins where that of the left ends, or if calls gather the two."""
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


def _fused(run: Sequence[Product]) -> HorizontalFusion:
    """Return the fusion of a run of two or more products."""
    first = run[0].alone
    n, gathered = sum(product.alone.n for product in run), gathered_roles(first)
    fields: dict[str, Any] = {"out": Layout.contiguous((first.m, n), first.out.dtype)}
    for role, layout in first.operands:
        if role != "a":
            fields[role] = _widened(layout, n, gathered=role in gathered)
    return HorizontalFusion(products=tuple(run), problem=dataclasses.replace(first, **fields))


def _widened(layout: Layout, n: int, *, gathered: bool) -> Layout:
    """Return the layout of the same rows with n columns."""
    size = (*layout.size[:-1], n)
    return Layout.contiguous(size, layout.dtype) if gathered else dataclasses.replace(layout, size=size)


def address_of(x: Tensor, known: Addresses) -> int | None:
    """Return the address of a graph's input or of a view of one, or None for anything else."""
    begin, offset = known.get(storage_of(x)), x.storage_offset()
    return begin + offset * x.element_size() if begin is not None and isinstance(offset, int) else None


def adjacent_inputs() -> tuple[tuple[int, int], ...]:
    """Return the pairs of inputs that this process's memory allows to fuse: the second begins in it where the first ends."""
    inputs = [real for real, _ in real_inputs()]
    begins = {(x.data_ptr(), x.dtype): place for place, x in enumerate(inputs)}
    ends = [(place, begins.get((x.data_ptr() + x.nbytes, x.dtype))) for place, x in enumerate(inputs)]
    return tuple((place, next_) for place, next_ in ends if next_ is not None and _alike(inputs[place], inputs[next_]))


def _alike(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors differ in the size of at most one dimension, like the weights of one input."""
    return x.dim() == y.dim() and sum(a != b for a, b in zip(x.shape, y.shape, strict=True)) <= 1


def real_inputs() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each real tensor that Dynamo found with its fake tensor, in Dynamo's order. Parts of a subclass are separate."""
    context = TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    if context is None or mode is None:
        return
    for real in list(context.tensor_to_context):
        fake = mode.fake_tensor_converter._get_memo(real)
        if type(real) in (Tensor, torch.nn.Parameter) and real.layout is torch.strided and fake is not None:
            yield real, fake


def storage_of(x: Tensor) -> StorageWeakRef:
    """Return a key of a tensor's storage."""
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
