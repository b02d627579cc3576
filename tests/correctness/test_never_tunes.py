"""What never tunes does not tune later either: in a compiled graph, in a backward pass, and in another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import gemmtune
from gemmtune import settings
from gemmtune.dispatch import strategies
from gemmtune.dispatch.plan import Plan

Tensor = torch.Tensor
X = torch.randn(3, 32, generator=torch.Generator().manual_seed(6))


@pytest.fixture(autouse=True)
def tuned(own_store: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let torch run every product that would be tuned. Yield the operations of these products."""
    found: list[str] = []

    def noted(request: strategies.Request) -> Plan:
        found.append(request.problem.op)
        return strategies.fallback(request.problem, request.device, request.settings)

    others = tuple(noted if strategy is strategies.tuned_pick else strategy for strategy in strategies.STRATEGIES)
    monkeypatch.setattr(strategies, "STRATEGIES", others)
    with settings.patch(tune="on_miss", backends=("aten", "cpp")):
        yield found


def backward(result: Tensor) -> None:
    """Run the backward pass in another thread, as torch does for a GPU."""
    thread = threading.Thread(target=lambda: result.sum().backward())
    thread.start()
    thread.join()


@pytest.mark.rotates(3)
@pytest.mark.parametrize("kind", ["int8", "int4", "float8"])
def test_a_compiled_graph_of_a_quantized_model(kind, tuned):
    model = gemmtune.quantize_(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), kind, group=32)
    targets: list[Any] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    x = X.clone().requires_grad_()
    backward(compiled(x))
    torch.testing.assert_close(compiled(X), model(X))
    assert x.grad is not None
    assert not tuned
    [named] = {target for target in targets if getattr(target, "namespace", "") == "gemmtune"}
    assert named._schema.name == ("gemmtune::scaled_mm" if kind == "float8" else "gemmtune::mixed_mm")
    torch.ops.gemmtune.mixed_mm(X, torch.ones(32, 8, dtype=torch.int8))
    assert tuned == ["mixed_mm"], "a call by a user may tune"


def test_the_backward_pass_of_optimized_layers(tuned):
    dense, sparse = nn.Linear(32, 64), nn.Linear(64, 32)
    sparse.weight = nn.Parameter(sparse.weight.detach().to_sparse_bsr((16, 16)))
    model = gemmtune.optimize(nn.Sequential(dense, sparse))
    backward(model(X))
    assert sparse.weight.grad is not None
    assert dense.weight.grad is not None
    assert not tuned
    gemmtune.restore(model)


@pytest.mark.parametrize("operator", [False, True])
def test_a_backward_pass_has_the_settings_of_its_forward_pass(operator, tuned):
    multiply = torch.ops.gemmtune.mm if operator else gemmtune.mm
    w = torch.randn(32, 8, requires_grad=True)
    with settings.patch(tune="never"):
        result = multiply(X, w)
    backward(result)
    assert not tuned
    backward(multiply(X, w))
    assert tuned == ["mm", "mm"], "one product forward, and one backward"
