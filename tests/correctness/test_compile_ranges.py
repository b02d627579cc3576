"""Compiled graphs with dynamic shapes, and the tables of M of their weights."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs import rewriting_backend
from test_ranges import RowedBackend, W, backend, problem

import gemmtune
from gemmtune.dispatch import ready as plans
from gemmtune.integration.compile import planned
from gemmtune.integration.compile.store_policy import StorePolicy
from gemmtune.integration.swap import swaps

__all__ = ["backend"]


def test_a_dynamic_graph_runs_the_table_of_its_weight(backend: RowedBackend, monkeypatch: pytest.MonkeyPatch):
    """Each M runs the choice of its segment, though the graph was compiled for one M. Above the table torch runs."""
    gemmtune.tune(problem(2), m=(1, 64), progress=False)
    text, ran = problem(8).key, []
    original = planned.plan_for
    monkeypatch.setattr(planned, "plan_for", lambda p, index: ran.append(original(p, index)) or ran[-1])
    monkeypatch.setattr(swaps, "pending", True)
    for m in (3, 19, 20, 100):
        a, out = torch.randn(m, W.shape[0]), torch.empty(m, W.shape[1])
        planned.run_planned(a, W, out=out, problem=text, dynamic=True)
        torch.testing.assert_close(out, a @ W)
    assert not swaps.pending, "a call takes over tables that were made in the background"
    assert [(plan.choice.name, plan.origin) for plan in ran] == [("fake:low", "range")] * 2 + [("fake:high", "range")]


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_table_suffices_to_rewrite_a_product(backend: RowedBackend, dynamic: bool):
    """No M of the graph was tuned separately."""
    gemmtune.tune(problem(2), m=(1, 64), progress=False)
    linear = torch.nn.Linear(W.shape[0], W.shape[1], bias=False)
    linear.weight = torch.nn.Parameter(W.t(), requires_grad=False)
    torch._dynamo.reset()
    compiled = torch.compile(linear, fullgraph=True, dynamic=dynamic, backend=rewriting_backend(StorePolicy()))
    for m in (7, 37, 100):
        a = torch.randn(m, W.shape[0])
        torch.testing.assert_close(compiled(a), a @ W)
    ran = {plan.problem.m: plan.choice.name for plan in plans._plans.values()}
    assert ran == {7: "fake:low", 37: "fake:high"}, "above the table torch runs"
