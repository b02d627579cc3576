"""The plugin for vLLM against a stand-in of vLLM: registration, decisions, and the numbers of each kernel class."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_stand_in as stand_in
from tables_of_rows import put_table
from torch import nn
from torch.nn import functional
from vllm_layers import NAMES, int8_layer, mixed_layer
from vllm_stand_in import FP8Config, Int8Config, MixedConfig, QuantKey, Scale, Shape, StandIn

import gemmtune.integration.vllm as plugin
from gemmtune import settings
from gemmtune.dispatch.ready import forget_plans, ready
from gemmtune.integration.vllm.tables import _log_once
from gemmtune.problem import Problem

N, K = 48, 64
ROWS = 8


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[StandIn]:
    """A stand-in for vLLM on a CPU, without gemmtune, and tables in force."""
    made = StandIn("cpu")
    stand_in.install(monkeypatch, made)
    _log_once.cache_clear()
    caplog.set_level(logging.INFO, "vllm.gemmtune")
    with settings.patch(rows="shared", search="quick", backends=("aten", "cpp"), vllm="1"):
        yield made
    forget_plans()


def own_linear(bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(K, N, bias=bias, dtype=dtype).requires_grad_(False)


def planted(**words: Any) -> None:
    """Store a table for the layer's class whose choice for up to eight rows is ours."""
    put_table(Problem.mm(ROWS, N, K, dtype=torch.float32, device_type="cpu", **words), [(1, ROWS, "cpp:")])


def test_entry_point_names_a_function_that_imports_neither_torch_nor_vllm() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["vllm.general_plugins"] == {"gemmtune": "gemmtune.integration.vllm:register"}
    program = "import sys, gemmtune.integration.vllm as x; assert callable(x.register); print({'torch', 'vllm'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_registers_once_and_stands_before_vllms_kernels(vllm: StandIn) -> None:
    plugin.register()
    apply = vllm.linear.apply
    plugin.register()
    assert vllm.linear.apply is apply
    names = [[x.__name__ for x in kernels] for lists in vllm.lists.values() for kernels in lists.values()]
    ours = ["GemmtuneMixedLinearKernel", "GemmtuneInt8LinearKernel", "GemmtuneFP8LinearKernel", "GemmtuneFP8BlockLinearKernel"]
    assert names == [[name, "TheirKernel"] for name in ours]


@pytest.mark.parametrize(("change", "line"), [({"vllm": "0"}, "GEMMTUNE_VLLM=0"), ({"disable": True}, "GEMMTUNE_DISABLE")])
def test_switched_off_leaves_vllm_as_it_is(vllm: StandIn, caplog: pytest.LogCaptureFixture, change: Any, line: str) -> None:
    before = vllm.linear.apply
    with settings.patch(**change):
        plugin.register()
    assert vllm.linear.apply is before
    assert caplog.messages == [f"gemmtune leaves vLLM as it is, because {line} is set"]


def test_a_version_without_a_point_is_one_line_that_names_it(vllm: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    before = vllm.linear.apply
    points = [(module, name) for module, names in vllm.contents.items() if module != "vllm" for name in names]
    for module, name in points:
        with monkeypatch.context() as without:
            without.delattr(sys.modules[module], name)
            plugin.register()
        assert caplog.messages == [f"gemmtune leaves vLLM 0.0.stand.in as it is, because it lacks {module}.{name}"]
        caplog.clear()
    assert len(points) == 13
    monkeypatch.setattr(vllm.embedding, "apply", lambda self, layer, x, bias, more: x)
    plugin.register()
    (line,) = caplog.messages
    assert line.endswith("UnquantizedEmbeddingMethod.apply(layer, x, bias)")
    assert vllm.linear.apply is before


def test_other_platforms_stay_as_they_are(vllm: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    before = vllm.linear.apply
    platform = vllm.contents["vllm.platforms"]["current_platform"]
    monkeypatch.setattr(platform, "_enum", stand_in.PlatformEnum.XPU)
    plugin.register()
    assert vllm.linear.apply is before
    assert caplog.messages == ["gemmtune leaves vLLM as it is on cpu, expected one of CUDA, CPU"]


def test_layer_without_a_table_is_vllms_and_the_log_says_how_to_make_one(vllm: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()
    method, layer = vllm.linear(), own_linear(dtype=torch.float16)
    method.process_weights_after_loading(layer)
    assert layer.processed_by_vllm
    method.apply(layer, torch.ones(3, K, dtype=torch.float16))
    assert layer.applied_by_vllm
    assert vllm.config.additional_config == {}
    assert f"make one by: gemmtune tune 1..8192x{N}x{K} --dtype float16 --layout nt --device cpu" in caplog.messages[-1]


def test_layer_with_a_table_is_ours_for_every_m_and_never_stale(vllm: StandIn) -> None:
    planted()
    plugin.register()
    method, layer = vllm.linear(), own_linear(bias=True)
    method.process_weights_after_loading(layer)
    assert not hasattr(layer, "processed_by_vllm")  # it would pack the weight, and drop it
    assert vllm.config.additional_config == {"gemmtune": [f"mm [{N}, {K}] torch.float32"]}
    ready.clear()
    for shape in ((1, K), (5, K), (2, 3, K), (ROWS + 9, K), (0, K)):
        x = torch.randn(shape)
        torch.testing.assert_close(method.apply(layer, x, layer.bias), functional.linear(x, layer.weight, layer.bias))
        torch.testing.assert_close(method.apply(layer, x), functional.linear(x, layer.weight))
    assert not hasattr(layer, "applied_by_vllm")
    assert {entry.plan.problem.m for entry in ready.values() if entry.plan.choice.backend == "cpp"} >= {1, 5, 6}
    layer.weight.data.copy_(torch.randn(N, K))  # as vLLM loads weights again, which torch does not count
    x = torch.randn(5, K)
    torch.testing.assert_close(method.apply(layer, x), functional.linear(x, layer.weight))


def test_graphs_look_the_kernel_up_at_each_run(vllm: StandIn) -> None:
    planted()
    plugin.register()
    method, layer = vllm.embedding(), own_linear()
    method.process_weights_after_loading(layer)
    graphs = list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: method.apply(layer, x), backend=backend, dynamic=True, fullgraph=True)
    ready.clear()
    for m in (3, 4, 7):
        x = torch.randn(m, K)
        torch.testing.assert_close(compiled(x), functional.linear(x, layer.weight))
    assert len(graphs) == 1
    assert {entry.plan.problem.m for entry in ready.values() if entry.plan.choice.backend == "cpp"} == {3, 4, 7}


def test_a_table_of_torchs_choices_alone_leaves_the_layer_to_vllm(vllm: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    put_table(Problem.mm(ROWS, N, K, dtype=torch.float32, device_type="cpu"), [(1, ROWS, "aten:mm")])
    plugin.register()
    layer = own_linear()
    vllm.linear().process_weights_after_loading(layer)
    assert layer.processed_by_vllm
    assert "torch is the fastest in the table" in caplog.messages[-1]


def test_a_configuration_that_cannot_be_keyed_leaves_the_layer_to_vllm(vllm: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    planted()
    vllm.config.additional_config = object()
    plugin.register()
    layer = own_linear()
    vllm.linear().process_weights_after_loading(layer)
    assert layer.processed_by_vllm
    assert "additional_config is no dict" in caplog.messages[-1]


def test_weights_that_are_no_matrices_stay_vllms(vllm: StandIn) -> None:
    planted()
    plugin.register()
    skipped = own_linear()
    skipped._cpu_skip_gemm_dispatch = True
    for layer in (nn.Conv1d(4, 4, 3), own_linear().to("meta"), skipped):
        vllm.linear().process_weights_after_loading(layer)
        assert layer.processed_by_vllm


def test_batch_invariance_needs_a_batch_invariant_table_of_every_m(vllm: StandIn, monkeypatch: Any, caplog: Any) -> None:
    planted()
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)
    plugin.register()
    layer = own_linear()
    vllm.linear().process_weights_after_loading(layer)
    assert layer.processed_by_vllm
    assert "no batch-invariant table" in caplog.messages[-1]
    assert "--batch-invariant" in caplog.messages[-1]
    with settings.patch(batch_invariant=True):
        planted()
    vllm.config.scheduler_config.max_num_batched_tokens = ROWS
    method, layer = vllm.linear(), own_linear(bias=True)
    method.process_weights_after_loading(layer)
    assert not hasattr(layer, "processed_by_vllm")
    x = torch.randn(ROWS, K)
    whole = method.apply(layer, x, layer.bias)
    torch.testing.assert_close(whole, functional.linear(x, layer.weight, layer.bias))
    kernel = vllm.kernel("_POSSIBLE_KERNELS")
    assert "batch-invariant" in kernel.can_implement(MixedConfig((K, N), "uint4b8", 32, False))[1]


def test_mixed_kernel_computes_every_layout(vllm: StandIn) -> None:
    plugin.register()
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
    plugin.register()
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


GOOD = MixedConfig((K, N), "uint4b8", 32, False)
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
    plugin.register()
    kernel = vllm.kernel("_POSSIBLE_KERNELS")
    for name, (change, expected) in REFUSED.items():
        served, reason = kernel.can_implement(dataclasses.replace(GOOD, **change))
        assert not served, name
        assert expected in reason, name


def test_decides_alike_under_vllms_defaults_for_new_tensors(vllm: StandIn) -> None:
    planted()
    plugin.register()
    kernel, layer, before = vllm.kernel("_POSSIBLE_KERNELS"), own_linear(), torch.get_default_dtype()
    reasons = []
    for device in ("cpu", "meta"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                vllm.linear().process_weights_after_loading(layer)
                reasons.append(kernel.can_implement(GOOD))
            assert torch.get_default_dtype() == torch.bfloat16
        finally:
            torch.set_default_dtype(before)
    assert not hasattr(layer, "processed_by_vllm")
    assert reasons[0] == reasons[1] == kernel.can_implement(GOOD)


def test_mixed_kernel_takes_a_layer_with_a_measured_table(vllm: StandIn) -> None:
    put_table(
        Problem.mixed_mm(ROWS, N, K, dtype="bf16", encoding="int4", scales="group_32", device_type="cpu"), [(1, ROWS, "cpp:")]
    )
    plugin.register()
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
    plugin.register()
    kernel, names = vllm.kernel("_POSSIBLE_INT8_KERNELS"), ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
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
    plugin.register()
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
    plugin.register()
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
    plugin.register()
    for name in ("_POSSIBLE_FP8_KERNELS", "_POSSIBLE_FP8_BLOCK_KERNELS"):
        kernel = vllm.kernel(name)
        assert kernel.is_supported(80) == (False, "compute capability: got 80, expected at least 89")
        assert kernel.is_supported(90) == (True, None)
        assert kernel.is_supported() == (True, None)  # a CPU computes them in any case
