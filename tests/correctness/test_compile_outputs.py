"""What leaves a compiled graph has torch's strides and storage: results, aliases, and tensors saved for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_graphs import FixedPolicy, decided, rewriting_backend
from input_kinds import difference
from torch import nn
from torch.nn import functional

from gemmtune.integration import compile as compile_pass
from gemmtune.integration.adjacent import lay_out, same_inputs
from gemmtune.integration.compile import backend

Tensor = torch.Tensor
ROWS, WIDTHS = 6, (64, 32, 16)


@torch.library.custom_op("gemmtune_tests::keep", mutates_args=())
def keep(x: Tensor) -> Tensor:
    """Return the strides of a tensor, as an operator may that reads its memory."""
    return torch.tensor(x.stride())


@keep.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.dim(), dtype=torch.int64)


ENDS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], int]] = {
    "all": (lambda q, k, v: (q, k, v), 0),
    "the last": (lambda q, k, v: (q.exp(), k.exp(), v), 2),
    "the middle": (lambda q, k, v: (q.exp(), k, v.exp()), 0),
    "a transpose": (lambda q, k, v: (q.exp(), k.exp(), v.t()), 2),
    "a flat view": (lambda q, k, v: (q.exp(), k.exp(), v.view(-1)), 2),
    "aliases": (lambda q, k, v: (q.exp(), k.exp(), v, v.view(-1), v[1:]), 2),
    "columns": (lambda q, k, v: (q[:, :3], k.exp(), v.exp()), 2),
    "parts": (lambda q, k, v: (*q.split(16, -1), k.exp(), v.exp()), 2),
    "heads": (lambda q, k, v: (q.unflatten(-1, (4, 16)).transpose(0, 1), k.exp(), v.exp()), 2),
    "expanded": (lambda q, k, v: (q.exp(), k.exp(), v.expand(2, ROWS, 16)), 2),
    "detached": (lambda q, k, v: (q.exp(), k.exp(), v.detach()), 2),
    "mutated": (lambda q, k, v: (q.add_(1), k.exp(), v.exp()), 3),
    "read by another operator": (lambda q, k, v: (q.exp(), k.exp(), v.exp(), keep(v)), 2),
    "converted": (lambda q, k, v: (q.double(), k.exp(), v.exp()), 3),
    "added": (lambda q, k, v: (q.sum() + k.exp().sum() + v.tanh().sum(),), 3),
    "next to each other": (lambda q, k, v: (torch.cat([q, k, v], -1),), 3),
}
"""Ends of three products of one input, and the number of products that are joined in front of each without a gradient."""


class Heads(nn.Module):
    """Three layers of one input for each end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(32, n) for n in WIDTHS) for _ in ENDS)

    def forward(self, inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        ends = zip(ENDS.values(), self.layers, inputs, strict=True)
        return [end(*(layer(x) for layer in layers)) for (end, _), layers, x in ends]


def joined_heads(inputs: tuple[Tensor, ...]) -> Heads:
    torch.manual_seed(7)
    model = Heads()
    with torch.no_grad(), same_inputs(model) as groups:
        model(inputs)
    lay_out(model, groups)
    return model


@pytest.mark.turn(0, 3)
@pytest.mark.parametrize("grad", [False, True])
def test_joined_products(grad):
    inputs = tuple(torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(place)) for place in range(len(ENDS)))
    model, saved = joined_heads(inputs), list[Tensor]()
    with torch.set_grad_enabled(grad), decided() as made:
        expected = model(inputs)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            results = torch.compile(model, fullgraph=True, backend=rewriting_backend(FixedPolicy("alone")))(inputs)
        found = dict(zip(ENDS, results, strict=True))
        for end, wanted in zip(ENDS, expected, strict=True):
            assert [difference(x, y) for x, y in zip(found[end], wanted, strict=True)] == [None] * len(wanted), end
    joined = sum(x.taken == "joined" for x in made)
    assert joined >= 3 if grad else joined == sum(count for _, count in ENDS.values())
    # A joined result would hold the memory of all columns for each of its parts.
    of_joins = {ROWS * 4 * (sum(WIDTHS[first:last])) for first in range(3) for last in range(first + 2, 4)}
    assert not [x.shape for x in saved if x.untyped_storage().nbytes() in of_joins - {x.nbytes}]
    assert len({x.untyped_storage().data_ptr() for x in found["aliases"][2:]}) == 1


@pytest.mark.turn(1, 3)
def test_joined_products_of_inductor():
    layers = joined_heads((torch.randn(ROWS, 32),) * len(ENDS)).layers[0]
    x = torch.randn(ROWS, 32)
    backend.install(policy=FixedPolicy("alone"))
    try:
        with torch.no_grad(), decided() as made:
            q, k, v = torch.compile(lambda x: (layers[0](x).exp(), layers[1](x).exp(), layers[2](x)), fullgraph=True)(x)
            for got, wanted in zip((q, k, v), (layers[0](x).exp(), layers[1](x).exp(), layers[2](x)), strict=True):
                assert difference(got, wanted) is None
    finally:
        compile_pass.uninstall()
    assert sorted(x.taken for x in made) == ["alone", "joined", "joined"]


def forms() -> dict[str, Callable[[], Tensor]]:
    """Return products with epilogues, layouts and sizes for which a result could have other strides."""
    numbers = torch.Generator().manual_seed(8)

    def new(*size: int) -> Tensor:
        return torch.randn(size, generator=numbers)

    x, x3, w, bias, r, rt = new(3, 4), new(2, 3, 4), new(5, 4), new(5), new(3, 5), new(5, 3).t()
    b3, r3t, permuted = new(2, 4, 5), new(5, 3, 2).permute(2, 1, 0), new(3, 2, 4).transpose(0, 1)
    return {
        "linear": lambda: functional.linear(x, w, bias),
        "linear of a batch": lambda: functional.linear(x3, w, bias).relu(),
        "linear of a vector": lambda: functional.linear(x[0], w, bias),
        "linear without rows": lambda: functional.linear(x[:0], w, bias),
        "linear without inputs": lambda: functional.linear(x3[..., :0], w[:, :0], bias),
        "one column": lambda: functional.linear(x, w[:1]),
        "transposed": lambda: torch.mm(x, w.t()).t(),
        "matmul of a batch": lambda: permuted @ b3,
        "addmm": lambda: torch.addmm(rt, x, w.t(), alpha=2, beta=0.5),
        "addmm with infinity": lambda: torch.addmm(r, x, w.t(), alpha=float("inf")),
        "baddbmm": lambda: torch.baddbmm(r3t, x3, b3),
        "added to column-major": lambda: rt + torch.mm(x, w.t()),
        "batch added to permuted": lambda: r3t * functional.gelu(torch.bmm(x3, b3)),
        "of integers": lambda: x.int() @ w.int().t(),
    }


@pytest.mark.turn(2, 3)
def test_strides_of_products_with_epilogues():
    calls = forms()
    backend.install(policy=FixedPolicy("fused"))
    try:
        with torch.no_grad(), decided() as made:
            expected = {name: form() for name, form in calls.items()}
            results = torch.compile(lambda: {name: form() for name, form in calls.items()}, fullgraph=True)()
            overflowing = torch.compile(lambda x: torch.addmm(x, x, x, alpha=1e39))
            with pytest.raises(RuntimeError, match="overflow"):
                overflowing(torch.ones(2, 2))
    finally:
        compile_pass.uninstall()
    found = {name: why for name, y in expected.items() if (why := difference(results[name], y)) is not None}
    assert not found
    assert sum(decision.taken != "" for decision in made) > len(calls) / 2
