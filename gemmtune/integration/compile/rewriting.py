"""The pass: before Inductor lowers a graph, GEMMs with their epilogues become planned products, in the steps of ``__call__``."""

import functools
import hashlib
import importlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext
from torch._inductor.custom_graph_pass import CustomGraphPass

from ... import settings as settings_module
from ...device import detect
from ...operators.torch_products import with_dimensions
from ...problem import Problem
from ...store.store import open_store
from ...threads import in_a_thread
from ...version import __version__
from . import attention_times
from .attention import Attention, attention_of
from .attention_times import AttentionDecision
from .decisions import RewritePolicy
from .epilogues import EpilogueOperand
from .experts import changes_around
from .horizontal import HorizontalFusion, adjacent_inputs, find_horizontal_fusions, into_columns
from .invariant_joins import is_batch_invariant, join_invariant
from .planned import OPERATOR, ready_plan
from .planned_horizontal import OPERATOR as HORIZONTAL_OPERATOR
from .planned_horizontal import ready_horizontal
from .products import PRODUCTS, Product, product_of
from .report import Decision, GemmDecision, Graph, keep

aten = torch.ops.aten
_ORIGIN = ("stack_trace", "nn_module_stack", "original_aten")
"""Metadata that names the source of a node."""
AnyPass = Callable[[fx.Graph], None]


class RewriteProducts(CustomGraphPass):
    """Rewrites each GEMM as ``policy`` decides. ``others`` are passes that were installed before, and run first."""

    def __init__(self, policy: RewritePolicy, others: Sequence[AnyPass] = ()) -> None:
        self.policy = policy
        self.others = tuple(others)

    def __call__(self, graph: fx.Graph) -> None:
        # Run the passes that were installed before.
        for other in self.others:
            other(graph)
        # Join batch-invariant layers.
        invariant = is_batch_invariant(graph)
        joined = join_invariant(graph)
        # Find the GEMMs and those that may become one, and measure what the policy needs for all of them at once.
        order = {node: place for place, node in enumerate(graph.nodes)}
        nodes = [node for node in graph.nodes if node.target in PRODUCTS]
        products = [product for node in nodes if not isinstance(product := product_of(node, order), str)]
        fusions = find_horizontal_fusions(products)
        self.policy.prepare(products, fusions)
        # Find the changes around grouped products while the original nodes are there.
        changes = changes_around(nodes)
        # Rewrite horizontal fusions first, then each remaining GEMM.
        rewriting = _Rewriting(graph=graph, policy=self.policy, order=order, invariant=invariant)
        fused = {node: decision for fusion in fusions for node, decision in rewriting.rewrite_fusion(fusion)}
        decided = joined + [fused[node] if node in fused else rewriting.rewrite_node(node) for node in nodes]
        # Replace attention of one query.
        decided += rewriting.rewrite_attention()
        # Keep the decisions for ``explain``.
        if decided:
            keep(Graph(compile_id=CompileContext.current_compile_id(), decisions=tuple(decided)))
        # Apply the changes, and teach Inductor the operators that the graph has now.
        for change in changes:
            change()
        if changes or any(decision.taken for decision in decided):
            importlib.import_module(".lowering", __package__).register()
            graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Return our part of a graph's key in Inductor's cache: our source, the policy, adjacent inputs, tables, and other passes.

        None if the policy or another pass has no key. Inductor then does not cache the graph.
        """
        reported = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.others]
        known, adjacent = (self.policy.token(), *reported), adjacent_inputs()
        tables = open_store(settings_module.current()).digest() if adjacent else ""
        return None if None in known else (_source_digest(), __version__, adjacent, tables, *known)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rewriting:
    """The rewriting of one graph. Equal GEMMs of a graph, such as a model's layers, share one decision."""

    graph: fx.Graph
    policy: RewritePolicy
    order: dict[fx.Node, int]
    """The place of each node in the original graph."""
    invariant: bool
    """The graph has layers of ``optimize(batch_invariant=True)``."""
    decisions: dict[Hashable, Decision] = field(default_factory=dict)
    attentions: dict[str, AttentionDecision | None] = field(default_factory=dict)

    def rewrite_fusion(self, fusion: HorizontalFusion) -> Iterator[tuple[fx.Node, GemmDecision]]:
        """Replace the GEMMs of a fusion and yield their decisions. Yield nothing if they stay apart."""
        key = (fusion.dynamic, *((product.alone, product.fused, product.before_reduction) for product in fusion.products))
        if key not in self.decisions:
            self.decisions[key] = self.policy.decide_horizontal(fusion)
        decision = self.decisions[key]
        if not decision.taken:
            return
        pick = _replace_fusion(self.graph, fusion, self.order)
        for product in fusion.products:
            yield product.gemm, _report(product, decision, pick, fusion.problem)

    def rewrite_node(self, node: fx.Node) -> GemmDecision:
        """Replace a GEMM if the policy decides so. Its Problem is stated again: another replacement may have changed its inputs."""
        product = product_of(node, self.order)
        if isinstance(product, str):
            return GemmDecision(shape="x".join(map(str, node.meta["val"].shape)), taken="", reason=product)
        key = (product.alone, product.fused, product.before_reduction, product.torchs)
        if key not in self.decisions:
            self.decisions[key] = self.policy.decide(product)
        decision = self.decisions[key]
        return _report(product, decision, _replace(self.graph, product, decision) if decision.taken else None)

    def rewrite_attention(self) -> Iterator[GemmDecision]:
        """Replace attention of one query where the policy decides so, and yield the decisions."""
        for attention in list(attention_of(self.graph.nodes)):
            key = attention.key
            if key not in self.attentions:
                self.attentions[key] = self._decide_attention(attention)
            if (decision := self.attentions[key]) is None:
                continue
            if decision.config is not None:
                attention.replace(decision.config)
            pick = None if decision.config is None else str(decision.config)
            yield GemmDecision(
                shape=str(attention),
                taken=decision.taken,
                reason=decision.reason,
                times_us=decision.times_us,
                pick=pick,
                attention=True,
            )

    def _decide_attention(self, attention: Attention) -> AttentionDecision | None:
        """Return the policy's decision. Where a row must not depend on its batch, one config for any batch, whatever the policy."""
        current, device = settings_module.current(), detect(attention.values[0].device)
        if current.disable or not (self.invariant or current.batch_invariant):
            return self.policy.decide_attention(attention)
        if not attention_times.serves(device):
            return None
        return in_a_thread(lambda: attention_times.decide_for_any_batch(attention, device))


def _report(product: Product, decision: Decision, pick: str | None, joined: Problem | None = None) -> GemmDecision:
    return GemmDecision(
        shape=product.shape,
        taken=decision.taken,
        reason=decision.reason,
        times_us=decision.times_us,
        pick=pick,
        alone=product.alone,
        fused=product.fused,
        joined=joined,
    )


def _replace(graph: fx.Graph, product: Product, decision: Decision) -> str:
    """Replace the GEMM, up to the last node of a fused epilogue, by a planned product. Return the name of the choice that runs."""
    match = product.match if decision.taken == "fused" else None
    problem = product.alone if match is None else product.fused
    assert problem is not None
    last = product.gemm if match is None else match.last
    value, result = product.gemm.meta["val"], last.meta["val"]
    plan = ready_plan(problem, -1 if value.device.type == "cpu" else value.device.index)
    with graph.inserting_before(last):
        # Call the planned product on operands shaped as the Problem has them.
        extra = [_with_sizes(graph, x, value) for x in match.operands] if match else []
        alpha, beta = product.scalars
        keywords: dict[str, Any] = {"dynamic": product.dynamic, "alpha": alpha, "beta": beta}
        given = zip(product.alone.operands, product.tensors, strict=True)
        operands = [_with_dimensions(graph, product.alone, role, x) for (role, _), x in given]
        new = graph.call_function(OPERATOR, ([*operands, *extra], problem.key), keywords)
        new.meta.update({name: last.meta[name] for name in _ORIGIN if name in last.meta})
        new.meta["val"] = result if problem.gated else result.new_empty(value.shape)
        # Apply a mask that was between the product and its SwiGLU, then a view that was in the epilogue.
        if problem.gated and product.masked is not None:
            mask, zero, _ = product.masked.args
            new = graph.call_function(aten.where.self, (mask, zero, new))
            new.meta["val"] = result
        if match is not None and match.sizes is not None:
            new = graph.call_function(aten.reshape.default, (new, match.sizes))
            new.meta["val"] = result
    last.replace_all_uses_with(new)
    return plan.choice.name


def _replace_fusion(graph: fx.Graph, fusion: HorizontalFusion, order: dict[fx.Node, int]) -> str:
    """Replace several GEMMs by one planned product at the place of the first. Return the name of the choice that runs."""
    earliest = min(fusion.products, key=lambda product: order[product.gemm])
    first, a = earliest.gemm, earliest.tensors[0]
    value, text = first.meta["val"], fusion.problem.key
    plan = ready_horizontal(fusion.problem, fusion.widths, -1 if value.device.type == "cpu" else value.device.index)
    for node in fusion.pieces:
        _move_before(first, node, order)
    with graph.inserting_before(first):
        keywords: dict[str, Any] = {"dynamic": fusion.dynamic}
        new = graph.call_function(HORIZONTAL_OPERATOR, ([a, *fusion.pieces], text, list(fusion.widths)), keywords)
        new.meta.update({name: first.meta[name] for name in _ORIGIN if name in first.meta})
        new.meta["val"] = value.new_empty((*value.shape[:-1], fusion.problem.n))
        into_columns([product.gemm for product in fusion.products], new, fusion.widths)
    return plan.choice.name


def _move_before(first: fx.Node, node: fx.Node, order: dict[fx.Node, int]) -> None:
    """Move a view of a graph's input before the node ``first``, with the nodes that it is computed from."""
    if node.op == "call_function" and order[node] > order[first]:
        for source in node.all_input_nodes:
            _move_before(first, source, order)
        first.prepend(node)


def _with_dimensions(graph: fx.Graph, problem: Problem, role: str, node: fx.Node) -> fx.Node:
    """Return an operand with the dimensions of the Problem, as a new node if torch's differ."""
    value = node.meta["val"]
    shaped = with_dimensions(problem.op, role, value)
    if shaped is value:
        return node
    made = graph.call_function(aten.unsqueeze.default, (node, 1))
    made.meta["val"] = shaped
    return made


def _with_sizes(graph: fx.Graph, operand: EpilogueOperand, gemm: torch.Tensor) -> fx.Node:
    """Return an epilogue's operand with the shape of the Problem, as a new node if it needs a view."""
    if operand.sizes is None:
        return operand.node
    made = graph.call_function(aten.reshape.default, (operand.node, operand.sizes))
    made.meta["val"] = operand.node.meta["val"].reshape(gemm.shape if operand.rank > 1 else operand.sizes)
    return made


@functools.cache
def _source_digest() -> str:
    """Return a digest of gemmtune's source: the pass, the functions that compiled code calls, and the search behind both."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
