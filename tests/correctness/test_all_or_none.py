"""A conversion of a model in place that fails, or is interrupted, leaves the model as it was."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import gemmtune
from gemmtune import QuantizedWeight, settings
from gemmtune.integration import sparsify
from gemmtune.integration.modules import is_optimized
from gemmtune.integration.quantize import quantized
from gemmtune.integration.replaced import replacing

KINDS = ("int4", "int8", "float8")
FAILURES = (MemoryError, KeyboardInterrupt, RuntimeError)
LAYERS = 4


@pytest.fixture(autouse=True)
def never(own_store):
    with settings.patch(tune="never"):
        yield


def tied() -> nn.Sequential:
    """Layers of which two share a weight."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    model[3].weight = model[1].weight
    return model


class Failing:
    """A function that fails in one of its calls."""

    def __init__(self, function, number: int, failure: type[BaseException]) -> None:
        self.function, self.left, self.failure = function, number, failure

    def __call__(self, *args, **kwargs):
        if not self.left:
            raise self.failure("for the test")
        self.left -= 1
        return self.function(*args, **kwargs)


def converted(model: nn.Module, conversion: str) -> nn.Module:
    return gemmtune.sparsify_(model, block=16) if conversion == "sparsify_" else gemmtune.quantize_(model, conversion, group=32)


@pytest.mark.parametrize("conversion", [*KINDS, "sparsify_"])
def test_a_failure_at_each_layer_leaves_the_model_as_it_was(conversion, monkeypatch):
    place, name = (sparsify, "_largest") if conversion == "sparsify_" else (QuantizedWeight, "quantize")
    for failure, number in itertools.product(FAILURES, range(LAYERS - 1)):
        model = tied()
        before = {key: (x, x.clone()) for key, x in model.named_parameters(remove_duplicate=False)}
        with monkeypatch.context() as patch:
            patch.setattr(place, name, Failing(getattr(place, name), number, failure))
            with pytest.raises(failure, match="for the test"):
                converted(model, conversion)
        after = dict(model.named_parameters(remove_duplicate=False))
        assert after.keys() == before.keys(), (failure, number)
        for key, (x, values) in before.items():
            assert after[key] is x, (failure, number, key)
            assert torch.equal(x, values), (failure, number, key)
    converted(model, conversion)
    assert isinstance(model[0].weight, QuantizedWeight) or model[0].weight.layout is torch.sparse_bsr
    assert model[3].weight is model[1].weight


def test_a_failure_in_either_run_of_optimize_leaves_the_forwards():
    for number in (1, LAYERS + 2):  # one run finds the layers with the same input, and one the products
        model = gemmtune.sparsify_(tied(), block=16)
        gemmtune.optimize(model[0])
        failing = Failing(lambda *_: None, number, KeyboardInterrupt)
        for layer in model:
            layer.register_forward_pre_hook(failing)
        before = {key: (x, x.to_dense()) for key, x in model.named_parameters(remove_duplicate=False)}
        with pytest.raises(KeyboardInterrupt, match="for the test"):
            gemmtune.optimize(model, tune=torch.randn(3, 64), progress=False)
        assert [is_optimized(layer) for layer in model] == [True, False, False, False]
        after = dict(model.named_parameters(remove_duplicate=False))
        assert all(after[key] is x and torch.equal(x.to_dense(), values) for key, (x, values) in before.items())
        gemmtune.restore(model[0])


def test_a_weight_that_cannot_be_quantized_leaves_the_model_as_it_was():
    for number in range(LAYERS):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
        before = [layer.weight for layer in model]
        with torch.no_grad():
            model[number].weight[3, 5] = torch.nan
        with pytest.raises(gemmtune.errors.InvalidProblemError, match=f"quantize_: {number}: .* infinity or NaN"):
            gemmtune.quantize_(model, "int8")
        assert all(layer.weight is x for layer, x in zip(model, before, strict=True))


def test_floats_are_freed_one_by_one_where_nobody_needs_them_back():
    """``from_pretrained`` throws a model away if its quantization fails, and large ones must not exist twice."""
    for all_or_none in (True, False):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
        alive: list[int] = []
        kept = [torch.utils.weak.WeakTensorKeyDictionary({layer.weight: True}) for layer in model]
        counted = nn.Linear.__setattr__

        def count(module, name, value, alive=alive, kept=kept, counted=counted):
            counted(module, name, value)
            alive.append(sum(map(len, kept)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Linear, "__setattr__", count)
            quantized(model, "int8", 128, (), all_or_none=all_or_none)
        assert alive == ([LAYERS] * LAYERS if all_or_none else [3, 2, 1, 0])


def replaced_until(model: nn.Sequential, number: int) -> None:
    """Replace weights, each twice, until the layer of that number."""
    with replacing() as replace:
        for i, layer in enumerate(model):
            if i == number:
                raise KeyboardInterrupt
            replace(layer, "weight", nn.Parameter(torch.zeros(64, 64)))
            replace(layer, "weight", nn.Parameter(torch.ones(64, 64)))


def test_replacing_undoes_each_step():
    model = tied()
    before = dict(model.named_parameters(remove_duplicate=False))
    for number in range(LAYERS):
        with pytest.raises(KeyboardInterrupt):
            replaced_until(model, number)
        assert all(x is before[name] for name, x in model.named_parameters(remove_duplicate=False))
