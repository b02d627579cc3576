"""The plugin for vLLM against a stand-in of vLLM: registration, decisions, and the numbers of each kernel class."""

from __future__ import annotations

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
from serving_checks import check_graphs_look_kernels_up
from tables_of_rows import put_table
from torch import nn
from torch.nn import functional
from vllm_stand_in import MixedConfig, StandIn

import gemmtune.integration.vllm as plugin
from gemmtune import settings
from gemmtune.dispatch.ready import ready
from gemmtune.problem import Problem

N, K = 48, 64
ROWS = 8
GOOD = MixedConfig((K, N), "uint4b8", 32, False)
PACKED = "vLLM packs its weights on a CPU and is faster with them; set GEMMTUNE_VLLM=all to run by gemmtune's tables anyway"


@pytest.fixture
def vllm(own_store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[StandIn]:
    """A stand-in for vLLM on a CPU, without gemmtune, and tables in force."""
    caplog.set_level(logging.INFO, "vllm.gemmtune")
    with stand_in.on_cpu(monkeypatch) as made:
        yield made


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
    assert f"make one by: gemmtune tune 1..64x{N}x{K} --dtype float16 --layout nt --device cpu" in caplog.messages[-1]


def test_layers_on_a_cpu_are_vllms_by_default_whose_packed_weights_are_faster(vllm: StandIn, caplog: Any) -> None:
    planted()
    with settings.patch(vllm="1"):
        plugin.register()
        layer = own_linear()
        vllm.linear().process_weights_after_loading(layer)
        assert layer.processed_by_vllm
        kernel = vllm.kernel("_POSSIBLE_KERNELS")
        assert kernel.can_implement(GOOD) == (False, PACKED)
    assert f"vLLM runs mm Mx{N}x{K} float32 nt on cpu: {PACKED}" in caplog.messages


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
    check_graphs_look_kernels_up(method, layer)


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
