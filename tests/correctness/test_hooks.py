"""Layers with a hook of accelerate, which replaces the forward of each and may keep its weight elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from extras import needs
from models import Needed, accelerate
from torch import nn

import gemmtune
from gemmtune import QuantizedWeight
from gemmtune.errors import InvalidProblemError
from gemmtune.integration.modules import is_optimized
from gemmtune.integration.quantize import dequantize_

pytestmark = needs("accelerate")
hooks = Needed("accelerate.hooks")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_stored(own_store):
    """Tests begin with an empty store."""


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def hooked(model: nn.Module) -> nn.Module:
    for layer in model:
        hooks.add_hook_to_module(layer, hooks.ModelHook())
    return model


def offloaded(model: nn.Module) -> nn.Module:
    return accelerate.cpu_offload(model, CPU)


def optimized(model: nn.Module) -> list[bool]:
    return [is_optimized(layer) for layer in model if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize("hook", [hooked, offloaded])
def test_layers_are_optimized_and_restored_behind_a_hook(hook: Callable[[nn.Module], nn.Module]):
    x = torch.randn(4, 64)
    expected = mlp()(x)
    before, after = hook(gemmtune.optimize(mlp())), gemmtune.optimize(hook(mlp()))
    for model in (before, after, copy.deepcopy(after)):
        assert optimized(model) == [True, True]
        assert torch.allclose(model(x), expected, atol=1e-5)
        gemmtune.restore(model)
        assert optimized(model) == [False, False]
        assert torch.allclose(model(x), expected, atol=1e-5)
    hooks.remove_hook_from_module(before, recurse=True)
    assert optimized(before) == [False, False], "accelerate puts back the forward that restore left"
    hooks.remove_hook_from_module(gemmtune.optimize(after), recurse=True)
    assert optimized(after) == [True, True]
    assert optimized(gemmtune.restore(after)) == [False, False]
    for model in (before, after):
        assert torch.allclose(model(x), expected, atol=1e-5)


def test_a_failed_call_puts_back_what_a_hook_calls():
    model = hooked(mlp())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        gemmtune.optimize(model, tune=torch.zeros(2, 3), batch_invariant=True, progress=False)
    assert optimized(model) == [False, False]
    assert model(torch.zeros(2, 64)).shape == (2, 64)


def test_offloaded_weights_keep_their_kind():
    x = torch.randn(4, 64)
    model = mlp()
    hooks.add_hook_to_module(model[0], hooks.AlignDevicesHook(CPU, offload=True))
    with pytest.warns(RuntimeWarning, match="0 stays as it is: got a weight that accelerate has offloaded, expected one in memory"):
        gemmtune.quantize_(model, "int8")
    assert [isinstance(layer.weight, QuantizedWeight) for layer in (model[0], model[2])] == [False, True]
    assert torch.allclose(model(x), mlp()(x), atol=0.05)
    quantized = offloaded(gemmtune.quantize_(mlp(), "int8"))
    expected = quantized(x)
    with pytest.raises(InvalidProblemError, match=r"dequantize_: 0\.weight: got a weight that accelerate has .*remove_hook"):
        dequantize_(quantized)
    assert torch.equal(quantized(x), expected)
    hooks.remove_hook_from_module(quantized, recurse=True)
    assert torch.allclose(dequantize_(quantized)(x), expected, atol=1e-5)
