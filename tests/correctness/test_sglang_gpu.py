"""The plugin's hooks on a GPU, against a stand-in for SGLang: real shapes, default tables and CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import sglang_stand_in as stand_in
import torch
from sglang_stand_in import StandIn, awq_layer, scaled_layer
from test_vllm_gpu import check
from torch import nn
from torch.nn import functional

import gemmtune.integration.sglang as plugin
from gemmtune.dispatch.ready import ready
from gemmtune.integration.serving.products import OP
from gemmtune.integration.sglang.mixed import KIND
from gemmtune.integration.sglang.points import DENSE, MIXED, SCALED
from gemmtune.integration.sglang.scaled import SERVED

pytestmark = pytest.mark.gpu
Tensor = torch.Tensor
N, K = 6144, 4096
"""The product of queries, keys and values of a Llama with 8e9 parameters."""


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[StandIn]:
    """A stand-in for SGLang on a GPU, with our hooks, which may make default tables."""
    caplog.set_level(logging.INFO, "sglang.gemmtune")
    with stand_in.on("cuda", monkeypatch) as made:
        plugin.register()
        made.registry.apply_hooks()
        yield made


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_dense_layer_in_graphs(sglang: StandIn, bias: bool, caplog: pytest.LogCaptureFixture) -> None:
    method, layer = sglang.method(DENSE), nn.Linear(K, N, bias=bias, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
    method.process_weights_after_loading(layer)
    assert layer.processed_by_sglang
    if not getattr(layer, OP):
        pytest.skip(f"nothing is shipped or predicted for this GPU: {caplog.messages[-1]}")
    weight, added = layer.weight.float(), layer.bias.float() if bias else None
    check(lambda x: method.apply(layer, x, layer.bias), lambda x: functional.linear(x.float(), weight, added), torch.bfloat16, 0.01)
    assert not hasattr(layer, "applied_by_sglang")
    layer.weight.data.copy_(torch.randn_like(layer.weight) / 64)  # update_weights
    x = torch.randn(16, K, device="cuda", dtype=torch.bfloat16)
    expected = functional.linear(x.float(), layer.weight.float(), added)
    torch.testing.assert_close(method.apply(layer, x, layer.bias).float(), expected, atol=0.05, rtol=0.02)


def test_awq_layer_in_graphs(sglang: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    layer, config, weight = awq_layer(K, N, 128, device="cuda")
    method = sglang.method(MIXED[1])
    method.quant_config = config
    method.process_weights_after_loading(layer)
    assert getattr(layer, KIND) == "uint4", caplog.messages
    ready.clear()
    check(lambda x: method.apply(layer, x), lambda x: x.float() @ weight, torch.bfloat16, 0.01)
    assert any(not entry.plan.choice.baseline for entry in ready.values())


@pytest.mark.parametrize(("target", "dtype"), [(SCALED[0], torch.float8_e4m3fn), (SCALED[3], torch.int8)], ids=["fp8", "int8"])
def test_scaled_layer_in_graphs(sglang: StandIn, target: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no tensor cores of float8")
    weight = torch.randn(N, K, device="cuda")
    layer, method = scaled_layer(weight, dtype), sglang.method(target)
    method.process_weights_after_loading(layer)
    monkeypatch.setitem(SERVED, (dtype, N, K, torch.bfloat16), True)  # a layer without a table too, which torch then computes
    check(lambda x: method.apply(layer, x), lambda x: x.float() @ weight.t(), torch.bfloat16, 0.08)
    assert sglang.products == []
