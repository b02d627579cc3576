"""Parametrized weights, which change state when they are read: each forward reads them once, and nothing else does."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

import gemmtune
from gemmtune import settings
from gemmtune.errors import InvalidProblemError
from gemmtune.integration import defaults, modules
from gemmtune.integration.weights import classes_of


class Counted(nn.Module):
    """A parametrization that counts its evaluations in a buffer, as spectral_norm iterates in one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return weight / self.count


@pytest.fixture
def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16))
    register_parametrization(made[0], "weight", Counted())
    made[0].parametrizations.weight[0].count.zero_()
    return made


def count(model: nn.Sequential) -> int:
    return int(model[0].parametrizations.weight[0].count)


def invariant(model: nn.Sequential) -> None:
    with settings.patch(backends=("aten", "cpp"), search="quick"):
        gemmtune.optimize(model, batch_invariant=True)


CALLS = {
    "optimize": gemmtune.optimize,
    "default tables": lambda model: list(defaults._problems(model)),
    "invariant": invariant,
    "sparsify": lambda model: gemmtune.sparsify_(model, block=16),
    "quantize": lambda model: gemmtune.quantize_(model, "int8"),
    "restore": lambda model: gemmtune.restore(gemmtune.optimize(model)),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_on_a_model_do_not_compute_its_weights(name, model, own_store):
    with suppress(InvalidProblemError):  # a call may refuse the model: it stays as it is
        CALLS[name](model)
    assert count(model) == 0


@pytest.mark.parametrize("by_parts", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_computes_a_weight_once(by_parts, compiled, model, own_store, monkeypatch):
    monkeypatch.setattr(modules, "BY_PARTS", by_parts)
    torch._dynamo.reset()
    forward = torch.compile(gemmtune.optimize(model), backend="eager") if compiled else gemmtune.optimize(model)
    for calls in (1, 2):
        forward(torch.randn(4, 32))
        assert count(model) == calls


@pytest.mark.parametrize("change", ["parametrized", "pruned"])
def test_a_bias_that_is_no_parameter_is_read_as_torch_reads_it(change, own_store):
    layer = nn.Linear(32, 16)
    if change == "pruned":
        prune.l1_unstructured(layer, "bias", 0.5)
    else:
        register_parametrization(layer, "bias", nn.Tanh())
    x = torch.randn(4, 32)
    expected = layer(x)
    assert torch.equal(gemmtune.optimize(layer)(x), expected)
    assert torch.equal(nn.Linear.forward(layer, x), expected)


def test_a_layer_whose_bias_is_no_parameter_has_a_table_with_a_bias(own_store):
    pruned = prune.l1_unstructured(nn.Linear(32, 16), "bias", 0.5)
    found = classes_of(nn.ModuleList([nn.Linear(32, 16, bias=False), pruned]))
    assert {x.problem.op for x in found} == {"mm", "addmm"}
