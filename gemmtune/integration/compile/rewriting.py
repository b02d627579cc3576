"""The pass: GEMMs of a graph that Inductor is about to lower, with the pointwise nodes behind them, become planned products."""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext
from torch._inductor.custom_graph_pass import CustomGraphPass

from ...operators.torch_products import with_dimensions
from ...problem import Problem
from ...version import __version__
from .addresses import neighbours
from .experts import changes_around
from .joins import Join, joins_of
from .judging import Judge, Verdict
from .planned import OPERATOR, ready_plan
from .planned_join import OPERATOR as JOIN
from .planned_join import ready_join
from .products import PRODUCTS, Product, product_of
from .report import Decision, Graph, keep
from .tails import Extra

aten = torch.ops.aten
_ORIGIN = ("stack_trace", "nn_module_stack", "original_aten")
"""What a node tells of where it came from."""
AnyPass = Callable[[fx.Graph], None]


class RewriteProducts(CustomGraphPass):
    """Rewrites each GEMM as the judge says. ``others`` are passes that were installed before, and run first."""

    def __init__(self, judge: Judge, others: Sequence[AnyPass] = ()) -> None:
        self.judge = judge
        self.others = tuple(others)

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.others:
            other(graph)
        order = {node: place for place, node in enumerate(graph.nodes)}
        nodes = [node for node in graph.nodes if node.target in PRODUCTS]
        # Rewriting one changes what the next one reads, so that each is looked at again then.
        products = [product for node in nodes if not isinstance(product := product_of(node, order), str)]
        joins = joins_of(products)
        self.judge.prepare(products, joins)
        verdicts: dict[Hashable, Verdict] = {}
        changes = changes_around(nodes)
        joined = {node: decision for join in joins for node, decision in self._joined(graph, join, order, verdicts)}
        decided = [joined[node] if node in joined else self._decided(graph, node, order, verdicts) for node in nodes]
        if decided:
            keep(Graph(compile_id=CompileContext.current_compile_id(), decisions=tuple(decided)))
        for change in changes:
            change()
        if changes or any(decision.taken for decision in decided):
            _register_lowering()
            graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Return the key of a graph in Inductor's cache: our code, the judge with its store, the inputs' memory, other passes.

        None, which keeps graphs out of the cache, where the judge or another pass has no key.
        """
        reported = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.others]
        known = (self.judge.token(), *reported)
        return None if None in known else (_source_digest(), __version__, neighbours(), *known)

    def _joined(
        self, graph: fx.Graph, join: Join, order: dict[fx.Node, int], verdicts: dict[Hashable, Verdict]
    ) -> Iterator[tuple[fx.Node, Decision]]:
        """What became of the GEMMs of a join; nothing where they stay apart."""
        alike = tuple((product.alone, product.fused, product.before_reduction) for product in join.products)
        verdict = verdicts.get(alike)
        if verdict is None:
            verdict = verdicts[alike] = self.judge.joined(join)
        if not verdict.taken:
            return
        pick = _rewrite_join(graph, join, order)
        for product in join.products:
            yield product.gemm, _decision(product, verdict, pick, join.problem)

    def _decided(self, graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int], verdicts: dict[Hashable, Verdict]) -> Decision:
        """What became of one GEMM. Layers of a model are alike: what was decided for one holds for all of its graph."""
        product = product_of(node, order)
        if isinstance(product, str):
            return Decision(shape="x".join(map(str, node.meta["val"].shape)), taken="", reason=product)
        alike = (product.alone, product.fused, product.before_reduction, product.torchs)
        verdict = verdicts.get(alike)
        if verdict is None:
            verdict = verdicts[alike] = self.judge.verdict(product)
        return _decision(product, verdict, _rewrite(graph, product, verdict) if verdict.taken else None)


def _decision(product: Product, verdict: Verdict, pick: str | None, joined: Problem | None = None) -> Decision:
    return Decision(
        shape=product.shape,
        taken=verdict.taken,
        reason=verdict.reason,
        pick=pick,
        times_us=verdict.times_us,
        alone=product.alone,
        fused=product.fused,
        joined=joined,
    )


def _rewrite(graph: fx.Graph, product: Product, verdict: Verdict) -> str:
    """Put a planned product in the place of the GEMM, or of the last node of its tail. Returns the name of what it runs."""
    tail = product.tail if verdict.taken == "fused" else None
    problem = product.alone if tail is None else product.fused
    assert problem is not None
    last = product.gemm if tail is None else tail.last
    value, result = product.gemm.meta["val"], last.meta["val"]
    plan = ready_plan(problem, -1 if value.device.type == "cpu" else value.device.index)
    with graph.inserting_before(last):
        extra = [_as_operand(graph, x, value) for x in tail.extra] if tail else []
        alpha, beta = product.scalars
        keywords: dict[str, Any] = {"dynamic": product.dynamic, "alpha": alpha, "beta": beta}
        operands = [
            _with_dimensions(graph, product.alone, role, x)
            for (role, _), x in zip(product.alone.operands, product.tensors, strict=True)
        ]
        new = graph.call_function(OPERATOR, ([*operands, *extra], problem.key), keywords)
        new.meta.update({name: last.meta[name] for name in _ORIGIN if name in last.meta})
        new.meta["val"] = result if problem.gated else result.new_empty(value.shape)
        if problem.gated and product.masked is not None:
            mask, zero, _ = product.masked.args
            new = graph.call_function(aten.where.self, (mask, zero, new))
            new.meta["val"] = result
        if tail is not None and tail.sizes is not None:
            new = graph.call_function(aten.reshape.default, (new, tail.sizes))
            new.meta["val"] = result
    last.replace_all_uses_with(new)
    return plan.choice.name


def _rewrite_join(graph: fx.Graph, join: Join, order: dict[fx.Node, int]) -> str:
    """Put one planned product in the place of several GEMMs, where the first was. Returns the name of what it runs."""
    first = min(join.products, key=lambda product: order[product.gemm])
    a, value = first.tensors[0], first.gemm.meta["val"]
    plan = ready_join(join.problem, join.widths, -1 if value.device.type == "cpu" else value.device.index)
    for node in join.pieces:
        _move_before(first.gemm, node, order)
    with graph.inserting_before(first.gemm):
        new = graph.call_function(JOIN, ([a, *join.pieces], join.problem.key, list(join.widths)))
        new.meta.update({name: first.gemm.meta[name] for name in _ORIGIN if name in first.gemm.meta})
        new.meta["val"] = value.new_empty(join.problem.out.size)
        begin = 0
        for product, width in zip(join.products, join.widths, strict=True):
            columns = graph.call_function(aten.slice.Tensor, (new, 1, begin, begin + width))
            columns.meta["val"] = new.meta["val"][:, begin : begin + width]
            product.gemm.replace_all_uses_with(columns)
            begin += width
    for product in join.products:
        graph.erase_node(product.gemm)
    return plan.choice.name


def _move_before(first: fx.Node, node: fx.Node, order: dict[fx.Node, int]) -> None:
    """Let a view of an input of the graph be made before another node, with all that it is made of."""
    if node.op == "call_function" and order[node] > order[first]:
        for source in node.all_input_nodes:
            _move_before(first, source, order)
        first.prepend(node)


def _with_dimensions(graph: fx.Graph, problem: Problem, role: str, node: fx.Node) -> fx.Node:
    """An operand with the dimensions that the Problem has."""
    value = node.meta["val"]
    shaped = with_dimensions(problem.op, role, value)
    if shaped is value:
        return node
    made = graph.call_function(aten.unsqueeze.default, (node, 1))
    made.meta["val"] = shaped
    return made


def _as_operand(graph: fx.Graph, extra: Extra, gemm: torch.Tensor) -> fx.Node:
    """An operand of the epilogue shaped as the Problem has it."""
    if extra.sizes is None:
        return extra.node
    made = graph.call_function(aten.reshape.default, (extra.node, extra.sizes))
    made.meta["val"] = extra.node.meta["val"].reshape(gemm.shape if extra.rank > 1 else extra.sizes)
    return made


def _register_lowering() -> None:
    """Inductor's lowerings are imported when it lowers: by now."""
    importlib.import_module(".lowering", __package__).register()


@functools.cache
def _source_digest() -> str:
    """Return a digest of the source of gemmtune: what rewrites a graph, what its code calls, and what both go by."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
