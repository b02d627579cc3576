"""Our layers in models that the package ``kernels`` or transformers' ``use_kernels`` changes: values, gradients, graphs."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from extras import needs
from models import Needed, made
from tables_of_rows import put_table
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.dispatch.ready import forget_plans
from gemmtune.integration.eager import Bound
from gemmtune.integration.modules import is_optimized
from gemmtune.problem import Problem

kernels = Needed("kernels")
N, K = 48, 64


@pytest.fixture
def hub(own_store: object) -> Iterator[Any]:
    """Register our layers, with a table whose choice is ours, and leave ``nn.Linear`` as it was."""
    module = importlib.import_module("gemmtune.integration.hub")
    with settings.patch(rows="shared", backends=("aten", "cpp")), kernels.use_kernel_mapping({}):
        for op in (Problem.mm, Problem.addmm):
            put_table(op(16, N, K, dtype=torch.float32, device_type="cpu"), [(1, 64, "cpp:")])
        module.register_kernels()
        yield module
    del nn.Linear.kernel_layer_name
    forget_plans()


def test_without_the_package_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    monkeypatch.delitem(sys.modules, "gemmtune.integration.hub", raising=False)
    with pytest.raises(
        ModuleNotFoundError, match=re.escape("got no package kernels; expected it: pip install 'gemmtune[kernels]'")
    ):
        importlib.import_module("gemmtune.integration.hub")


class Scaled(nn.Linear):
    """A layer with a forward of its own, which ours must not replace."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(K, N), nn.SiLU(), nn.Linear(N, K, bias=False), Scaled(K, N))


def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the result of a model and the gradients of its parameters."""
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("mode", ["INFERENCE", "TRAINING"])
@needs("kernels")
def test_kernelized_layers_are_ours_with_equal_values_and_gradients(hub: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x = network(), torch.randn(5, K)
    ours = kernels.kernelize(copy.deepcopy(plain), mode=kernels.Mode[mode], device="cpu")
    assert [is_optimized(layer) for layer in ours] == [True, False, True, False]
    for got, expected in zip(trained(ours, x), trained(plain, x), strict=True):
        torch.testing.assert_close(got, expected)
    ran = list[str]()
    run = Bound.run
    monkeypatch.setattr(Bound, "run", lambda self, *rest: (ran.append(self.pick.plan.choice.name), run(self, *rest))[1])
    ours = kernels.kernelize(copy.deepcopy(plain), mode=kernels.Mode[mode], device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(ours(x), plain(x))
    assert ran
    assert all(name.startswith("cpp:") for name in ran)
    gemmtune.restore(ours)
    assert not any(map(is_optimized, ours))


@needs("kernels")
def test_a_kernelized_model_compiles(hub: Any) -> None:
    plain, x = network(), torch.randn(5, K)
    mode = kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE
    ours = kernels.kernelize(copy.deepcopy(plain), mode=mode, device="cpu", use_fallback=False)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(ours, backend="eager", fullgraph=True)(x), plain(x))


@needs("kernels")
def test_a_folder_of_kernels_may_offer_our_layer(hub: Any, tmp_path: Path) -> None:
    build = tmp_path / "build" / "torch-universal"
    build.mkdir(parents=True)
    (build / "metadata.json").write_text(
        '{"name": "ours", "id": "_ours", "version": 1, "license": "MIT", "backend": {"type": "cpu"}, "python-depends": []}'
    )
    (build / "__init__.py").write_text("from . import layers\n")
    (build / "layers.py").write_text("from gemmtune.integration.hub import Linear as OurLinear\n")
    mapping = {hub.LINEAR: {"cpu": kernels.LocalLayerRepository(repo_path=tmp_path, layer_name="OurLinear")}}
    with kernels.use_kernel_mapping(mapping):
        ours = kernels.kernelize(network(), mode=kernels.Mode.INFERENCE, device="cpu")
    assert is_optimized(ours[0])


@needs("models")
@needs("kernels")
def test_a_model_of_transformers_takes_our_layers(hub: Any) -> None:
    model, given = made("llama")
    with torch.no_grad():
        expected = model(**given).logits
        model.use_kernels = True
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        assert layers
        assert all(map(is_optimized, layers))
        torch.testing.assert_close(model(**given).logits, expected)
