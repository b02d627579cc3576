"""Changes around the grouped products of compiled mixtures of experts: the sort by expert and the sum of a token's rows."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import FixedPolicy
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gemmtune.integration.compile.experts import SUM, _narrow_type, changes_around
from gemmtune.integration.compile.rewriting import RewriteProducts

aten = torch.ops.aten
Tensor = torch.Tensor
GROUPED = aten._grouped_mm.default


class Watching(RewriteProducts):
    """The pass, which keeps the targets of the rewritten graph."""

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        self.targets = [node.target for node in graph.nodes]

    def uuid(self) -> None:
        """Return no key, so that Inductor's cache keeps no graph."""


def mixture(x: Tensor, scores: Tensor, w: Tensor, chosen: int, **how: Any) -> Tensor:
    """Return a mixture as in transformers, with one product for each expert instead of two around a gate."""
    weights, experts = torch.topk(scores.softmax(-1), chosen)
    numbers = experts.reshape(-1) if how.get("placed", True) else experts.reshape(-1) * 3
    sorted_numbers, order = torch.sort(numbers, descending=how.get("descending", False))
    count = w.shape[0]
    offs = torch.cumsum(torch.histc(sorted_numbers.float(), bins=count, min=0, max=count - 1), 0, dtype=torch.int32)
    y = torch._grouped_mm(x[order // chosen], w.mT, offs=offs)
    y = y.masked_fill((sorted_numbers >= count).unsqueeze(-1), 0.0) * weights.reshape(-1)[order].unsqueeze(-1).to(y.dtype)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=x.device)
    return y[back].view(x.shape[0], chosen, -1).sum(how.get("over", 1))


def given(tokens: int, experts: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + experts)
    sizes = ((tokens, 32), (tokens, experts), (experts, 16, 32))
    x, scores, w = (torch.randn(size, generator=generator) for size in sizes)
    return x.to(device, dtype), scores.to(device), w.to(device, dtype)


@pytest.mark.turn(2, 8)
def test_a_compiled_mixture_has_right_results() -> None:
    assert_right_as_compiled(*given(24, 48))


def assert_right_as_compiled(x: Tensor, scores: Tensor, w: Tensor) -> None:
    watching = Watching(FixedPolicy("alone"))
    with torch.no_grad():
        compiled = torch.compile(mixture, fullgraph=True, dynamic=False, options={"post_grad_custom_post_pass": watching})
        got = compiled(x, scores, w, 8).float()
        exact = mixture(x.float(), scores, w.float(), 8)
    assert SUM in watching.targets
    torch.testing.assert_close(got, exact, atol=0.1, rtol=0.02)
    assert F.cosine_similarity(got.flatten(), exact.flatten(), dim=0) > 0.9999


def changed(experts: int, chosen: int = 8, **how: Any) -> tuple[fx.GraphModule, list[torch.dtype]]:
    """Return the changed graph of a mixture, and the dtypes that it sorts."""
    with FakeTensorMode():
        inputs = (
            torch.empty(16, 32, dtype=torch.bfloat16),
            torch.empty(16, experts),
            torch.empty(experts, 16, 32, dtype=torch.bfloat16),
        )
        traced = make_fx(lambda *tensors: mixture(*tensors, chosen, **how), decomposition_table=select_decomp_table())(*inputs)
    for change in changes_around(node for node in traced.graph.nodes if node.target is GROUPED):
        change()
    traced.graph.eliminate_dead_code()
    traced.recompile()
    sorts = [node for node in traced.graph.nodes if node.target is aten.sort.default]
    return traced, [node.args[0].meta["val"].dtype for node in sorts]


@pytest.mark.parametrize(
    ("experts", "dtype"), [(128, torch.uint8), (129, torch.int16), (2**15, torch.int16), (2**15 + 8, torch.int64)]
)
def test_indices_of_experts_are_sorted_in_a_narrow_dtype(experts: int, dtype: torch.dtype) -> None:
    _, sorted_as = changed(experts)
    assert sorted_as == [dtype]


@pytest.mark.parametrize("how", [{"placed": False}, {"descending": True}], ids=str)
def test_other_sorts_keep_their_dtype(how: dict[str, Any]) -> None:
    _, sorted_as = changed(128, **how)
    assert sorted_as == [torch.int64]


def test_ascending_sorts_of_indices_from_topk_have_a_narrow_dtype() -> None:
    def narrow(*way: object, topk: tuple[object, ...] = (), place: int = 1, **words: object) -> bool:
        graph = fx.Graph()
        (scores := graph.placeholder("scores")).meta["val"] = torch.empty(5, 8)
        numbers = graph.call_function(operator.getitem, (graph.call_function(aten.topk.default, (scores, 2, *topk)), place))
        return _narrow_type(graph.call_function(aten.sort.default, (numbers, *way), words)) is not None

    ways: dict[tuple[object, ...], bool] = dict.fromkeys([(), (-1,), (0,), (-1, False), (0, False)], True)
    ways |= dict.fromkeys([(-2,), (1,), (-1, True), (0, True), (-2, False), (1, False)], False)
    assert {way: narrow(*way) for way in ways} == ways
    assert narrow(topk=(-1,))
    assert not any((narrow(topk=(0,)), narrow(place=0), narrow(stable=True)))


@pytest.mark.parametrize(("chosen", "how", "unrolled"), [(2, {}, False), (8, {}, True), (40, {}, False), (8, {"over": 2}, False)])
def test_a_sum_over_several_experts_is_unrolled(chosen: int, how: dict[str, Any], unrolled: bool) -> None:
    traced, _ = changed(48, chosen, **how)
    assert (SUM in {node.target for node in traced.graph.nodes}) is unrolled


def test_the_changed_graph_gives_the_same_numbers() -> None:
    traced, sorted_as = changed(200)
    assert sorted_as == [torch.int16]
    targets = {node.target for node in traced.graph.nodes}
    assert SUM in targets
    inputs = given(16, 200)
    assert torch.equal(traced(*inputs), mixture(*inputs, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 64, 1024])
def test_a_compiled_mixture_has_right_results_on_a_gpu(tokens: int) -> None:
    assert_right_as_compiled(*given(tokens, 64, "cuda"))
