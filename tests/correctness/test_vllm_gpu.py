"""The plugin's kernel classes on a GPU, against a stand-in for vLLM: real shapes, default tables and CUDA graphs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_stand_in as stand_in
from tables_of_rows import put_table
from torch import nn
from torch.nn import functional
from vllm_layers import NAMES, mixed_layer
from vllm_stand_in import (
    MOE,
    ExpertsConfig,
    ExpertsQuantization,
    FP8Config,
    MixedConfig,
    QuantKey,
    Scale,
    Shape,
    StandIn,
    run_experts,
)

import gemmtune.integration.vllm as plugin
from gemmtune import settings
from gemmtune.dispatch.ready import forget_plans, ready
from gemmtune.integration.serving.products import OP
from gemmtune.integration.serving.tables import log_once
from gemmtune.problem import Problem

pytestmark = pytest.mark.gpu
Tensor = torch.Tensor
N, K = 6144, 4096
"""The product of queries, keys and values of a Llama with 8e9 parameters."""
ROWS = (1, 2, 7, 16, 33, 64, 200)


@pytest.fixture
def vllm(own_store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[StandIn]:
    """A stand-in for vLLM on a GPU, with our plugin, which may make default tables."""
    made = StandIn("cuda")
    stand_in.install(monkeypatch, made)
    log_once.cache_clear()
    caplog.set_level(logging.INFO, "vllm.gemmtune")
    with settings.patch(rows="shared", vllm="all"):
        plugin.register()
        yield made
    forget_plans()


def captured(run: Callable[[Tensor], Tensor], m: int, dtype: torch.dtype, k: int = K) -> tuple[Tensor, Tensor]:
    """Warm up and capture a layer for M rows, replay it with new inputs, and return these and the result."""
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        run(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        result = run(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    return x, result


def check(run: Callable[[Tensor], Tensor], expected: Callable[[Tensor], Tensor], dtype: torch.dtype, most: float) -> None:
    """Check the replayed graphs of a layer for every M against a reference in float32."""
    for m in ROWS:
        x, got = captured(run, m, dtype)
        reference = expected(x)
        error = float((got.float() - reference).abs().max() / reference.abs().max())
        assert error < most, (m, error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_layer_in_graphs(vllm: StandIn, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    method, layer = vllm.linear(), nn.Linear(K, N, bias=False, dtype=dtype, device="cuda").requires_grad_(False)
    method.process_weights_after_loading(layer)
    if not getattr(layer, OP):
        pytest.skip(f"nothing is shipped or predicted for this GPU: {caplog.messages[-1]}")
    weight = layer.weight.float()
    check(lambda x: method.apply(layer, x), lambda x: functional.linear(x.float(), weight), dtype, 0.01)
    assert not hasattr(layer, "applied_by_vllm")
    layer.weight.data.copy_(torch.randn_like(layer.weight) / 64)  # as vLLM loads weights again
    x = torch.randn(16, K, device="cuda", dtype=dtype)
    torch.testing.assert_close(
        method.apply(layer, x).float(), functional.linear(x.float(), layer.weight.float()), atol=0.05, rtol=0.02
    )


@pytest.mark.parametrize("transposed", [False, True], ids=["gptq", "compressed-tensors"])
@pytest.mark.parametrize(("kind", "group"), [("uint4b8", 128), ("uint4b8", 32), ("uint4", 64), ("uint8b128", -1)])
def test_mixed_layer_in_graphs(vllm: StandIn, kind: str, group: int, transposed: bool) -> None:
    config = MixedConfig((K, N), kind, group, kind == "uint4")
    kernel = vllm.kernel("_POSSIBLE_KERNELS")
    served, reason = kernel.can_implement(config)
    assert served, reason
    layer, weight = mixed_layer(config, transposed=transposed, device="cuda")
    made = kernel(config, *NAMES)
    made.process_weights_after_loading(layer)
    ready.clear()
    check(lambda x: made.apply_weights(layer, x), lambda x: x.float() @ weight, torch.bfloat16, 0.01)
    assert any(not entry.plan.choice.baseline for entry in ready.values())


def quantized(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


FLOAT8: dict[str, Any] = {
    "tensor": (Shape(-1, -1), Shape(-1, -1)),
    "row": (Shape(1, -1), Shape(-1, 1)),
}


@pytest.mark.parametrize("name", [*FLOAT8])
def test_float8_layer_in_graphs(vllm: StandIn, name: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no tensor cores of float8")
    inputs, weights = FLOAT8[name]
    config = FP8Config(QuantKey(Scale(inputs)), QuantKey(Scale(weights)), (N, K))
    weight = torch.randn(N, K, device="cuda")
    scale = (weight.abs().amax() if name == "tensor" else weight.abs().amax(1, keepdim=True)) / 448
    layer = nn.Module()
    layer.weight, layer.weight_scale = quantized(weight, scale).t(), scale
    made = _unchecked(vllm.kernel("_POSSIBLE_FP8_KERNELS"))(config, ["weight", "weight_scale", "input_scale", "input_scale_ub"])
    check(lambda x: made.apply_weights(layer, x), lambda x: x.float() @ weight.t(), torch.bfloat16, 0.08)


def test_block_layer_in_graphs(vllm: StandIn) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no block-scaled products of float8")
    config = FP8Config(QuantKey(Scale(Shape(1, 128))), QuantKey(Scale(Shape(128, 128))), (N, K))
    weight = torch.randn(N, K, device="cuda")
    blocks = weight.view(N // 128, 128, K // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    layer = nn.Module()
    numbers = quantized(blocks, scale[:, None, :, None]).view(N, K)
    layer.weight, layer.weight_scale_inv = nn.Parameter(numbers, requires_grad=False), nn.Parameter(scale, requires_grad=False)
    made = _unchecked(vllm.kernel("_POSSIBLE_FP8_BLOCK_KERNELS"))(config)
    made.process_weights_after_loading(layer)
    check(lambda x: made.apply_weights(layer, x), lambda x: x.float() @ weight.t(), torch.bfloat16, 0.08)


def _unchecked(kernel: Any) -> Any:
    """Return a kernel class that takes a layer without a table too, which torch then computes."""
    return type(kernel.__name__, (kernel,), {"can_implement": classmethod(lambda cls, c: (True, None))})


@pytest.mark.parametrize("tokens", [1, 16, 100])
def test_experts_in_graphs(vllm: StandIn, tokens: int) -> None:
    config = ExpertsConfig(num_local_experts=8, hidden_dim=1024, intermediate_size_per_partition=512, in_dtype=torch.bfloat16)
    groups, hidden, inner = config.num_local_experts, config.hidden_dim, config.intermediate_size_per_partition
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        put_table(Problem.grouped_mm(16, n, k, groups=groups), [(1, 256, "triton:grouped_")])
    _, kind = sys.modules[f"{MOE}.oracle.unquantized"].select_unquantized_moe_backend(config)
    assert kind.__name__ == "GemmtuneExperts"
    made = kind(config, ExpertsQuantization())
    w1, w2 = (torch.randn(groups, n, k, device="cuda") / k**0.5 for n, k in ((2 * inner, hidden), (hidden, inner)))
    scores, ids = torch.randn(tokens, groups, device="cuda").softmax(-1).topk(2)

    def run(x: Tensor) -> Tensor:
        return run_experts(made, x, w1.bfloat16(), w2.bfloat16(), scores, ids.int(), dtype=torch.bfloat16)

    ready.clear()
    x, got = captured(run, tokens, torch.bfloat16, hidden)
    assert {entry.plan.choice.backend for entry in ready.values()} == {"triton"}
    gates, others = torch.einsum("tk,gnk->tgn", x.float(), w1).chunk(2, -1)
    every = torch.einsum("tgi,gki->tgk", functional.silu(gates) * others, w2)
    expected = (every.gather(1, ids.unsqueeze(-1).expand(-1, -1, hidden)) * scores.unsqueeze(-1)).sum(1)
    assert float((got.float() - expected).abs().max() / expected.abs().max()) < 0.02
