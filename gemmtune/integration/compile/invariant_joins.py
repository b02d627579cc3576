"""Batch-invariant layers of one input in a compiled graph, joined to one product where that has the bits of the separate ones."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from ...threads import in_a_thread
from ..adjacent import adjacent_runs
from ..invariant import GROUPED, LINEAR, QUANTIZED
from ..invariant_joined import OPERATOR, Columns, can_join
from .attention import example_numbers
from .horizontal import HorizontalFusion, into_columns, leaves_graph, real_inputs, storage_of
from .report import GemmDecision

_ROLES = ("weights", "scales", "zeros", "biases")
_ROLE_OF = {"b": "weights", "scale_b": "scales", "zero_b": "zeros", "inp": "biases"}


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """A product of the graph, with the nodes of its operands by role, and the real tensors that they stand for."""

    node: fx.Node
    nodes: Mapping[str, fx.Node]
    columns: Columns


def is_batch_invariant(graph: fx.Graph) -> bool:
    """Return True if the graph has a layer of ``optimize(batch_invariant=True)``."""
    return any(node.target in (LINEAR, GROUPED, QUANTIZED) for node in graph.nodes)


def join_invariant(graph: fx.Graph) -> list[GemmDecision]:
    """Join the batch-invariant layers of one input whose weights are adjacent. Return a decision for each of them."""
    nodes = [node for node in graph.nodes if node.target in (LINEAR, QUANTIZED) and not leaves_graph(node)]
    known = {storage_of(fake): real for real, fake in real_inputs()} if len(nodes) > 1 else {}
    alike: dict[Hashable, list[_Layer]] = {}
    for node in nodes:
        if (layer := _layer_of(node, known)) is not None:
            roles = tuple((role, x.meta["val"].dtype) for role, x in layer.nodes.items())
            alike.setdefault((node.args[0], layer.columns.encoding, roles), []).append(layer)
    runs = [run for layers in alike.values() for run in _runs(layers)]
    return [decision for run in runs if _has_the_bits(run) for decision in _replace(graph, run)]


def _layer_of(node: fx.Node, known: Mapping[StorageWeakRef, Tensor]) -> _Layer | None:
    """Return the layer of a product, or None for one of groups or of operands that are no inputs of the graph."""
    given: tuple[Any, ...]
    if node.target is LINEAR:
        _, weight, bias, is_layer = node.args
        given, encoding = (weight, None, None, bias), ""
    else:
        _, *parts, offs, encoding = node.args  # type: ignore[assignment]
        given, is_layer = tuple(parts), offs is None
    nodes: dict[str, Any] = {role: x for role, x in zip(_ROLES, given, strict=True) if x is not None}
    real = {role: known.get(storage_of(x.meta["val"])) for role, x in nodes.items() if x.op == "placeholder"}
    if not is_layer or real.keys() != nodes.keys() or any(x is None for x in real.values()):
        return None
    fields: dict[str, Any] = {role: [x] if (x := real.get(role)) is not None else [] for role in _ROLES}
    columns = Columns(**fields, encoding=str(encoding))
    dense = node.target is LINEAR and columns.weights[0].is_floating_point()
    return _Layer(node, nodes, columns) if dense or (node.target is QUANTIZED and columns.quantized) else None


def _runs(layers: Sequence[_Layer]) -> list[list[_Layer]]:
    """Return the runs of two or more layers whose operands are adjacent in memory."""
    ordered = sorted(layers, key=lambda layer: layer.columns.weights[0].data_ptr())
    return adjacent_runs(ordered, lambda x, y: Columns.of([x.columns, y.columns]).adjacent)


def _has_the_bits(run: Sequence[_Layer]) -> bool:
    """Return True if one product has the bits of the separate ones, for as many rows as the example has."""
    value = run[0].node.args[0].meta["val"]  # type: ignore[union-attr]
    size, columns = example_numbers(value.shape), Columns.of([layer.columns for layer in run])
    return in_a_thread(lambda: can_join(torch.zeros(size, dtype=value.dtype, device=value.device), columns))


def fusion_has_the_bits(fusion: HorizontalFusion) -> bool:
    """Return True if a horizontal fusion of layers [N, K] has the bits of its separate products."""
    known = {storage_of(fake): real for real, fake in real_inputs()}
    fields: dict[str, Any] = {role: [] for role in _ROLES}
    for product in fusion.products:
        for (role, layout), node in list(zip(product.alone.operands, product.tensors, strict=True))[1:]:
            real = known.get(storage_of(node.meta["val"]))
            size = layout.size[::-1] if role == "b" and not product.alone.operation.quantized else layout.size
            if real is None or role not in _ROLE_OF or tuple(real.shape) != size:
                return False
            fields[_ROLE_OF[role]].append(real)
    columns, value = Columns(**fields, encoding=fusion.problem.encoding), fusion.products[0].tensors[0].meta["val"]
    x = (fusion.problem.m, fusion.problem.k), value.dtype, value.device
    return in_a_thread(lambda: can_join(torch.zeros(x[0], dtype=x[1], device=x[2]), columns))


def _replace(graph: fx.Graph, run: Sequence[_Layer]) -> Iterator[GemmDecision]:
    """Replace layers by one product at the place of the first, and yield the decisions."""
    replaced = {layer.node for layer in run}
    first = next(node for node in graph.nodes if node in replaced)
    x, value = first.args[0], first.meta["val"]
    widths = [layer.node.meta["val"].shape[-1] for layer in run]
    pieces = [[layer.nodes[role] for layer in run if role in layer.nodes] for role in _ROLES]
    with graph.inserting_before(first):
        new = graph.call_function(OPERATOR, (x, *pieces, run[0].columns.encoding))
        new.meta |= {name: first.meta[name] for name in ("stack_trace", "nn_module_stack") if name in first.meta}
        new.meta["val"] = value.new_empty((*value.shape[:-1], sum(widths)))
        into_columns([layer.node for layer in run], new, widths)
    for width in widths:
        shape = "x".join(map(str, (*value.shape[:-1], width, x.meta["val"].shape[-1])))
        yield GemmDecision(
            shape=shape,
            taken="joined",
            reason=f"batch_invariant: one product for {len(run)} layers of one input, with their bits",
            pick=f"{sum(widths)} columns by their table",
        )
