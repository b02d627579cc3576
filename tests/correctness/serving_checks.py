"""Checks of the plugins for inference engines: graphs look kernels up, tokens are equal, tunings are counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from gemmtune.dispatch import strategies
from gemmtune.dispatch.ready import ready

TIE = 0.04
"""Difference of the two best log-probabilities below which 16-bit rounding may decide between tokens."""


def check_graphs_look_kernels_up(method: Any, layer: Any) -> None:
    """Check that one graph of a layer with a table runs our kernel for every M."""
    graphs = list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: method.apply(layer, x), backend=backend, dynamic=True, fullgraph=True)
    ready.clear()
    for m in (3, 4, 7):
        x = torch.randn(m, layer.weight.shape[1])
        torch.testing.assert_close(compiled(x), functional.linear(x, layer.weight))
    assert len(graphs) == 1
    assert {entry.plan.problem.m for entry in ready.values() if entry.plan.choice.backend == "cpp"} == {3, 4, 7}


def equal_but_for_ties(ours: Mapping[str, Any], theirs: Mapping[str, Any], tie: float) -> int:
    """Check that tokens are equal up to the first near tie of each prompt. Return the number of compared tokens."""
    compared = 0
    for got, expected, margins in zip(ours["tokens"], theirs["tokens"], theirs["margins"], strict=True):
        for place, margin in enumerate(margins):
            if got[place] != expected[place]:
                assert margin < tie, (got, expected, margins)
                break
            compared += 1
    return compared


def count_tunings() -> list[str]:
    """Return a list to which each later call that tunes or verifies adds its name, in this process."""
    tunings = list[str]()

    def counted(name: str) -> Any:
        whole = getattr(strategies, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            tunings.append(name)
            return whole(*arguments, **keywords)

        return call

    for name in ("select", "tune_rows", "defaults_for"):
        setattr(strategies, name, counted(name))
    return tunings
