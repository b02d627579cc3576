"""The plugin's kernel classes for quantized layers against a stand-in for vLLM: their numbers, and their answers why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_stand_in as stand_in
from tables_of_rows import put_table
from torch import nn
from vllm_layers import NAMES, int8_layer, mixed_layer
from vllm_stand_in import FP8Config, Int8Config, MixedConfig, QuantKey, Scale, Shape, StandIn

import gemmtune.integration.vllm as plugin
from gemmtune import settings
from gemmtune.dispatch.ready import ready
from gemmtune.problem import Problem

N, K, ROWS = 48, 64, 8
GOOD = MixedConfig((K, N), "uint4b8", 32, False)


@pytest.fixture
def vllm(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A stand-in for vLLM on a CPU with our plugin, and tables in force."""
    with stand_in.on_cpu(monkeypatch) as made:
        plugin.register()
        yield made


def test_mixed_kernel_computes_every_layout(vllm: StandIn) -> None:
    kernel, k, n = vllm.kernel("_POSSIBLE_KERNELS"), 256, 48
    for kind in ("uint4", "uint4b8", "uint8b128"):
        for group in (-1, 32, 64, 128):
            for transposed in (False, True):
                for dtype in (torch.float16, torch.bfloat16):
                    config = MixedConfig((k, n), kind, group, kind == "uint4", dtype)
                    layer, weight = mixed_layer(config, transposed=transposed)
                    made = kernel(config, *NAMES)
                    made.process_weights_after_loading(layer)
                    x, bias = torch.randn(2, 3, k).to(dtype), torch.randn(n).to(dtype)
                    got, expected = made.apply_weights(layer, x, bias), x.float() @ weight + bias.float()
                    assert got.dtype == dtype
                    error = float((got.float() - expected).abs().max() / expected.abs().max())
                    assert error < 0.01, (kind, group, transposed, dtype, error)


def test_mixed_kernel_reads_weights_that_are_loaded_again(vllm: StandIn) -> None:
    config = MixedConfig((128, 32), "uint4", 32, True)
    made = vllm.kernel("_POSSIBLE_KERNELS")(config, *NAMES)
    x = torch.randn(4, 128).bfloat16()
    layer, _ = mixed_layer(config, transposed=False)
    made.process_weights_after_loading(layer)
    made.apply_weights(layer, x)
    again, weight = mixed_layer(config, transposed=False, seed=9)
    made.process_weights_after_loading(again)
    for name in NAMES:  # vLLM copies the new parts into the memory of the old ones
        getattr(layer, name).data.copy_(getattr(again, name).data)
    torch.testing.assert_close(made.apply_weights(layer, x).float(), x.float() @ weight, atol=0.3, rtol=0.02)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"weight_type": "float4_e2m1f"}, "weight type: got float4_e2m1f, expected one of uint4, uint4b8, uint8b128"),
    "no zeros": ({"weight_type": "uint4"}, "zero points: got False for uint4, expected True"),
    "zeros": ({"zero_points": True}, "zero points: got True for uint4b8, expected False"),
    "group": ({"group_size": 16}, "group size: got 16, expected one of (-1, 32, 64, 128)"),
    "inputs": ({"act_type": torch.int8}, "inputs: got torch.int8, expected float16 or bfloat16"),
    "results": ({"out_type": torch.float32}, "results: got torch.float32, expected torch.bfloat16, the dtype of the inputs"),
    "odd K": ({"partition_weight_shape": (K + 1, N)}, "K"),
    "no table": ({}, f"no table of mixed_mm Mx{N}x{K} bfloat16 nt b int4 scale_b[32x1] on cpu is stored; make one by: "),
}


def test_mixed_kernel_says_why_not(vllm: StandIn) -> None:
    kernel = vllm.kernel("_POSSIBLE_KERNELS")
    for name, (change, expected) in REFUSED.items():
        served, reason = kernel.can_implement(dataclasses.replace(GOOD, **change))
        assert not served, name
        assert expected in reason, name


def test_mixed_kernel_takes_a_layer_with_a_measured_table(vllm: StandIn) -> None:
    put_table(
        Problem.mixed_mm(ROWS, N, K, dtype="bf16", encoding="int4", scales="group_32", device_type="cpu"), [(1, ROWS, "cpp:")]
    )
    kernel = vllm.kernel("_POSSIBLE_KERNELS")
    assert kernel.can_implement(GOOD) == (True, None)
    layer, weight = mixed_layer(GOOD, transposed=False)
    made = kernel(GOOD, *NAMES)
    assert vllm.config.additional_config["gemmtune"] == [f"mixed_mm {GOOD}"]
    made.process_weights_after_loading(layer)
    ready.clear()
    x = torch.randn(5, K).bfloat16()
    torch.testing.assert_close(made.apply_weights(layer, x).float(), x.float() @ weight, atol=0.1, rtol=0.02)
    assert [entry.plan.choice.backend for entry in ready.values()] == ["cpp"]


def test_int8_kernel_computes_every_kind_of_scale(vllm: StandIn) -> None:
    kernel, names = vllm.kernel("_POSSIBLE_INT8_KERNELS"), ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
    with settings.patch(vllm="1"):
        assert "set GEMMTUNE_VLLM=all" in kernel.can_implement(Int8Config())[1]
    with settings.patch(vllm="all"):
        assert "zero points" in kernel.can_implement(Int8Config(input_symmetric=False))[1]
        for by_column in (True, False):
            for static in (True, False):
                for widths in ([N], [N // 4, 3 * N // 4]):
                    layer, weight = int8_layer(N, K, by_column=by_column, static=static, widths=widths)
                    made = kernel(Int8Config(is_channelwise=by_column, is_static_input_scheme=static), names)
                    made.process_weights_after_loading(layer)
                    x, bias = torch.randn(2, 3, K), torch.randn(N)
                    expected = x @ weight.t() + bias
                    error = float((made.apply_weights(layer, x, bias) - expected).abs().max() / expected.abs().max())
                    assert error < 0.02, (by_column, static, widths, error)


def key(*shape: int, static: bool = False) -> QuantKey:
    return QuantKey(Scale(Shape(*shape), static))


FLOAT8 = {
    "tensor": FP8Config(key(-1, -1), key(-1, -1), (N, K)),
    "row": FP8Config(key(1, -1), key(-1, 1), (N, K)),
    "mixed": FP8Config(key(1, -1), key(-1, -1), (N, K)),
}


def test_float8_kernel_computes_tensors_and_rows(vllm: StandIn) -> None:
    kernel = vllm.kernel("_POSSIBLE_FP8_KERNELS")
    assert "scales: got" in kernel.can_implement(FLOAT8["mixed"])[1]
    assert f"no table of scaled_mm Mx{N}x{K}" in kernel.can_implement(FLOAT8["row"])[1]
    weight, x, bias = torch.randn(N, K), torch.randn(2, 3, K), torch.randn(N)
    for name in ("tensor", "row"):
        most = weight.abs().amax() if name == "tensor" else weight.abs().amax(1, keepdim=True)
        layer = nn.Module()
        layer.weight, layer.weight_scale = (weight / most * 448).to(torch.float8_e4m3fn).t(), most / 448
        made = unchecked(kernel, FLOAT8[name], ["weight", "weight_scale", "input_scale", "input_scale_ub"])
        got, expected = made.apply_weights(layer, x, bias), x @ weight.t() + bias
        assert got.dtype == torch.bfloat16
        assert float((got.float() - expected).abs().max() / expected.abs().max()) < 0.08, name


def unchecked(kernel: Any, config: Any, *more: Any) -> Any:
    """Return a kernel that vLLM would not have made, since no table serves its layer."""
    return type(kernel.__name__, (kernel,), {"can_implement": classmethod(lambda cls, c: (True, None))})(config, *more)


def test_block_kernel_computes_blocks(vllm: StandIn) -> None:
    n, k, kernel = 256, 384, vllm.kernel("_POSSIBLE_FP8_BLOCK_KERNELS")
    good = FP8Config(key(1, 128), key(128, 128), (n, k))
    for other in (
        dataclasses.replace(good, weight_quant_key=key(64, 128)),
        dataclasses.replace(good, activation_quant_key=key(1, 128, static=True)),
    ):
        assert "expected one of dynamic 1x128 and 128x128" in kernel.can_implement(other)[1]
    assert "no table of scaled_mm" in kernel.can_implement(good)[1]
    weight, x = torch.randn(n, k), torch.randn(5, k)
    blocks = weight.view(n // 128, 128, k // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    layer = nn.Module()
    numbers = (blocks / scale[:, None, :, None]).view(n, k).to(torch.float8_e4m3fn)
    layer.weight, layer.weight_scale_inv = nn.Parameter(numbers, requires_grad=False), nn.Parameter(scale, requires_grad=False)
    made = kernel(good)
    made.process_weights_after_loading(layer)
    assert layer.weight_scale_inv.shape == scale.shape
    expected = x @ weight.t()
    assert float((made.apply_weights(layer, x).float() - expected).abs().max() / expected.abs().max()) < 0.05


def test_float8_kernels_need_tensor_cores_of_float8(vllm: StandIn) -> None:
    for name in ("_POSSIBLE_FP8_KERNELS", "_POSSIBLE_FP8_BLOCK_KERNELS"):
        kernel = vllm.kernel(name)
        assert kernel.is_supported(80) == (False, "compute capability: got 80, expected at least 89")
        assert kernel.is_supported(90) == (True, None)
        assert kernel.is_supported() == (True, None)  # a CPU computes them in any case
