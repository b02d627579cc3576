"""The plugin for SGLang against a stand-in of SGLang: registration, decisions, and the numbers of each kind of layer."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_stand_in as stand_in
import torch
from serving_checks import check_graphs_look_kernels_up
from sglang_stand_in import Dispatched, Standard, StandIn, TopK, awq_layer, experts_layer, scaled_layer
from tables_of_rows import put_table
from torch import nn
from torch.nn import functional
from vllm_layers import mixed_layer
from vllm_stand_in import MixedConfig

import gemmtune.integration.sglang as plugin
from gemmtune import settings
from gemmtune.dispatch.ready import ready
from gemmtune.errors import InvalidProblemError
from gemmtune.integration.sglang.points import COMBINED, DENSE, EXPERTS, MIXED, PRODUCTS, SCALED
from gemmtune.problem import Problem

N, K, ROWS = 80, 128, 8
NAMES = {MIXED[0]: ("qweight", "scales", "qzeros"), MIXED[2]: ("weight_packed", "weight_scale", "weight_zero_point")}


@pytest.fixture
def sglang(own_store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[StandIn]:
    """A stand-in for SGLang on a CPU, without gemmtune, and tables in force, of which there are none at first."""
    caplog.set_level(logging.INFO, "sglang.gemmtune")
    with stand_in.on("cpu", monkeypatch) as made, settings.patch(search="quick", backends=("aten", "cpp")):
        yield made


def started(sglang: StandIn) -> None:
    """Let SGLang load our plugin."""
    plugin.register()
    sglang.registry.apply_hooks()


def own_linear(bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(K, N, bias=bias, dtype=dtype).requires_grad_(False)


def planted(**words: Any) -> None:
    """Store a table for the layer's class whose choice for up to eight rows is ours."""
    put_table(Problem.mm(ROWS, N, K, dtype=torch.float32, device_type="cpu", **words), [(1, ROWS, "cpp:")])


def ours_ran() -> set[str]:
    return {f"{entry.plan.problem.op} {entry.plan.choice.backend}" for entry in ready.values()}


def test_entry_point_names_a_function_that_imports_neither_torch_nor_sglang() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["sglang.srt.plugins"] == {"gemmtune": "gemmtune.integration.sglang:register"}
    program = (
        "import sys, gemmtune.integration.sglang as x; assert callable(x.register); print({'torch', 'sglang'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_registers_each_hook_once(sglang: StandIn) -> None:
    plugin.register()
    plugin.register()
    targets = [target for target, _ in sglang.registry.hooks]
    methods = [f"{x}.process_weights_after_loading" for x in (DENSE, EXPERTS, *MIXED, *SCALED)]
    assert sorted(targets) == sorted([*methods, *(f"{x}.apply" for x in (DENSE, EXPERTS, *MIXED)), *PRODUCTS])


@pytest.mark.parametrize(("change", "line"), [({"sglang": "0"}, "GEMMTUNE_SGLANG=0"), ({"disable": True}, "GEMMTUNE_DISABLE")])
def test_switched_off_leaves_sglang_as_it_is(sglang: StandIn, caplog: pytest.LogCaptureFixture, change: Any, line: str) -> None:
    with settings.patch(**change):
        plugin.register()
    assert sglang.registry.hooks == []
    assert caplog.messages == [f"gemmtune leaves SGLang as it is, because {line} is set"]


def test_a_version_without_a_point_is_one_line_that_names_it(sglang: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    quantized = {x.rsplit(".", 1)[0] for x in (*MIXED, *SCALED, *PRODUCTS)}
    others = {"sglang", COMBINED.rsplit(".", 1)[0], *quantized}
    points = [(module, name) for module, names in sglang.contents.items() for name in names if module not in others]
    points.remove(tuple(EXPERTS.rsplit(".", 1)))
    for module, name in points:
        if module.endswith("runtime_context"):
            continue  # older versions have none
        with monkeypatch.context() as without:
            without.delattr(sys.modules[module], name)
            plugin.register()
        assert caplog.messages == [f"gemmtune leaves SGLang 0.0.stand.in as it is, because it lacks {module}.{name}"]
        caplog.clear()
    dense = sglang.contents[DENSE.rsplit(".", 1)[0]]["UnquantizedLinearMethod"]
    monkeypatch.setattr(dense, "apply", lambda self, layer, x, bias, more: x)
    plugin.register()
    (line,) = caplog.messages
    assert line.endswith("UnquantizedLinearMethod.apply(layer, x, bias)")
    assert sglang.registry.hooks == []


def test_a_version_without_a_quantized_method_keeps_that_and_serves_the_rest(
    sglang: StandIn, monkeypatch: Any, caplog: Any
) -> None:
    module, name = MIXED[0].rsplit(".", 1)
    monkeypatch.delattr(sys.modules[module], name)
    started(sglang)
    assert caplog.messages[0] == f"gemmtune leaves layers of {MIXED[0]} as they are, which this SGLang has otherwise or not at all"
    assert MIXED[0] + ".apply" not in [target for target, _ in sglang.registry.hooks]
    assert f"{DENSE}.apply" in [target for target, _ in sglang.registry.hooks]


def test_layer_without_a_table_is_sglangs_and_the_log_says_how_to_make_one(sglang: StandIn, caplog: Any) -> None:
    started(sglang)
    method, layer = sglang.method(DENSE), own_linear(dtype=torch.float16)
    method.process_weights_after_loading(layer)
    method.apply(layer, torch.ones(3, K, dtype=torch.float16))
    assert layer.processed_by_sglang
    assert layer.applied_by_sglang
    assert f"make one by: gemmtune tune 1..64x{N}x{K} --dtype float16 --layout nt --device cpu" in caplog.messages[-1]


def test_layers_on_a_cpu_stay_sglangs_by_default(sglang: StandIn) -> None:
    planted()
    started(sglang)
    layer = own_linear()
    with settings.patch(sglang="1"):
        sglang.method(DENSE).process_weights_after_loading(layer)
    assert layer.processed_by_sglang
    assert not layer.gemmtune_op


def test_layer_with_a_table_is_ours_for_every_m_and_never_stale(sglang: StandIn) -> None:
    planted()
    started(sglang)
    method, layer = sglang.method(DENSE), own_linear(bias=True)
    method.process_weights_after_loading(layer)
    assert not hasattr(layer, "processed_by_sglang")  # it would pack the weight
    ready.clear()
    for shape in ((1, K), (5, K), (2, 3, K), (ROWS + 9, K), (0, K)):
        x = torch.randn(shape)
        expected = functional.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(method.apply(layer, x, bias=layer.bias), expected)
        torch.testing.assert_close(method.apply(layer, x), functional.linear(x, layer.weight))
    assert not hasattr(layer, "applied_by_sglang")
    assert {entry.plan.problem.m for entry in ready.values() if entry.plan.choice.backend == "cpp"} >= {1, 5, 6}
    layer.weight.data.copy_(torch.randn(N, K))  # update_weights, which torch does not count
    x = torch.randn(5, K)
    torch.testing.assert_close(method.apply(layer, x), functional.linear(x, layer.weight))
    layer.weight = nn.Parameter(torch.randn(N, K, dtype=torch.float64), requires_grad=False)  # a weight without a table
    method.process_weights_after_loading(layer)
    x = x.double()
    torch.testing.assert_close(method.apply(layer, x), functional.linear(x, layer.weight))
    assert layer.applied_by_sglang


def test_graphs_look_the_kernel_up_at_each_run(sglang: StandIn) -> None:
    planted()
    started(sglang)
    method, layer = sglang.method(DENSE), own_linear()
    method.process_weights_after_loading(layer)
    check_graphs_look_kernels_up(method, layer)


def test_weights_of_other_kinds_stay_sglangs(sglang: StandIn) -> None:
    planted()
    started(sglang)
    method, layer = sglang.method(DENSE), own_linear()
    for other in (nn.Conv1d(4, 4, 3), own_linear().to("meta")):
        method.process_weights_after_loading(other)
        assert other.processed_by_sglang
    method.process_weights_after_loading(layer)
    own_type: Any = type("Other", (torch.Tensor,), {})
    layer.weight = nn.Parameter(torch.randn(N, K).as_subclass(own_type), requires_grad=False)  # as torchao replaces weights
    method.apply(layer, torch.randn(3, K))
    assert layer.applied_by_sglang


def test_deterministic_inference_needs_a_batch_invariant_table_of_every_m(sglang: StandIn, caplog: Any) -> None:
    planted()
    started(sglang)
    method = sglang.method(DENSE)
    sglang.args.enable_deterministic_inference = True
    layer = own_linear()
    method.process_weights_after_loading(layer)
    assert layer.processed_by_sglang
    assert "no batch-invariant table" in caplog.messages[-1]
    with settings.patch(batch_invariant=True):
        planted()
    sglang.args.chunked_prefill_size = sglang.args.max_prefill_tokens = ROWS
    layer = own_linear(bias=True)
    method.process_weights_after_loading(layer)
    assert layer.gemmtune_op == "invariant"
    sglang.invariant = True  # SGLang replaces torch's products when the model is loaded
    x = torch.randn(ROWS, K)
    torch.testing.assert_close(method.apply(layer, x, layer.bias), functional.linear(x, layer.weight, layer.bias))
    assert not hasattr(layer, "applied_by_sglang")
    for change in ({"chunked_prefill_size": -1}, {"attn_dp_size": 2}):  # a batch may have any number of rows
        vars(sglang.args).update({"chunked_prefill_size": ROWS, "attn_dp_size": 1} | change)
        method.process_weights_after_loading(layer)
        assert layer.gemmtune_op == ""


def test_products_that_are_to_be_invariant_later_are_sglangs_again(sglang: StandIn) -> None:
    planted()
    put_table(Problem.int_mm(ROWS, N, K, device_type="cpu"), [(1, ROWS, "cpp:")])
    started(sglang)
    layer, scaled = own_linear(), scaled_layer(torch.randn(N, K), torch.int8, torch.float32)
    sglang.method(DENSE).process_weights_after_loading(layer)
    sglang.method(SCALED[3]).process_weights_after_loading(scaled)
    sglang.invariant = True
    sglang.method(DENSE).apply(layer, torch.randn(3, K))
    assert layer.applied_by_sglang
    sglang.method(SCALED[3]).apply(scaled, torch.randn(3, K))
    assert sglang.products == ["int8_scaled_mm"]


def test_arguments_of_older_versions(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang.gemmtune")
    with stand_in.on("cpu", monkeypatch, grouped=False) as sglang:
        sglang.args = SimpleNamespace(
            enable_deterministic_inference=True, chunked_prefill_size=16, max_prefill_tokens=24, enable_dp_attention=False
        )
        started(sglang)
        layer = own_linear(dtype=torch.bfloat16)
        sglang.method(DENSE).process_weights_after_loading(layer)
        assert layer.processed_by_sglang
        assert f"gemmtune tune 1..24x{N}x{K}" in caplog.messages[-1]
        assert "--batch-invariant" in caplog.messages[-1]


def quantized(target: str, group: int = 32) -> tuple[Any, nn.Module, torch.Tensor]:
    """Return a method's attributes, a layer of 4 bits in its checkpoint's layout, and the weight [K, N]."""
    if target == MIXED[1]:
        layer, config, weight = awq_layer(K, N, group)
        return {"quant_config": config}, layer, weight
    config = MixedConfig((K, N), "uint4b8", group, False)
    layer, weight = mixed_layer(config, transposed=target == MIXED[2])
    for name, part in zip(NAMES[target], "qsz", strict=True):
        setattr(layer, name, getattr(layer, part))
        delattr(layer, part)
    layer.weight = None
    layer.scheme = SimpleNamespace(kernel=SimpleNamespace(kernel_config=config))
    return {}, layer, weight


@pytest.mark.parametrize("target", MIXED, ids=["gptq", "awq", "compressed-tensors"])
def test_int4_layer_with_a_table_is_ours_and_is_never_loaded_into(sglang: StandIn, target: str) -> None:
    words: dict[str, Any] = {"encoding": "uint4", "zeros": True} if target == MIXED[1] else {"encoding": "int4"}
    problem = Problem.mixed_mm(ROWS, N, K, dtype="bf16", scales="group_32", device_type="cpu", **words)
    put_table(problem, [(1, ROWS, "cpp:")])
    started(sglang)
    attributes, layer, weight = quantized(target)
    method = sglang.method(target)
    vars(method).update(attributes)
    method.process_weights_after_loading(layer)
    assert not hasattr(layer, "processed_by_sglang")
    ready.clear()
    x, bias = torch.randn(2, 3, K).bfloat16(), torch.randn(N).bfloat16()
    expected = x.float() @ weight + bias.float()
    torch.testing.assert_close(method.apply(layer, x, bias).float(), expected, atol=0.15, rtol=0.02)
    assert ours_ran() == {"mixed_mm cpp"}
    before = method.apply(layer, x)
    method.process_weights_after_loading(layer)  # without new numbers
    torch.testing.assert_close(method.apply(layer, x), before, atol=0, rtol=0)
    parts = dict(layer.named_parameters())
    assert set(parts) & {name for names in NAMES.values() for name in names} == set(parts)
    for parameter in parts.values():
        with pytest.raises(InvalidProblemError, match="start SGLang again, or with GEMMTUNE_SGLANG=0"):
            parameter.weight_loader(parameter, torch.zeros(1))  # type: ignore[attr-defined]


@pytest.mark.parametrize("target", MIXED, ids=["gptq", "awq", "compressed-tensors"])
def test_int4_layer_without_a_table_is_sglangs(sglang: StandIn, target: str, caplog: pytest.LogCaptureFixture) -> None:
    started(sglang)
    attributes, layer, _ = quantized(target, group=64)
    method = sglang.method(target)
    vars(method).update(attributes)
    before = {name: x.clone() for name, x in layer.named_parameters()}
    method.process_weights_after_loading(layer)
    assert layer.processed_by_sglang
    assert all(torch.equal(before[name], x) for name, x in layer.named_parameters())
    assert f"no table of mixed_mm Mx{N}x{K} bfloat16 nt b" in caplog.messages[-1]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["fp8", "int8"])
def test_scaled_products_are_ours_where_a_table_is_stored(sglang: StandIn, dtype: torch.dtype) -> None:
    if dtype == torch.int8:
        put_table(Problem.int_mm(ROWS, N, K, device_type="cpu"), [(1, ROWS, "cpp:")])
        target, theirs, op = SCALED[3], "int8_scaled_mm", "int_mm"
    else:
        problem = Problem.scaled_mm(ROWS, N, K, dtype=dtype, out_dtype=torch.bfloat16, scales="row", device_type="cpu")
        put_table(problem, [(1, ROWS, "cpp:")])
        target, theirs, op = SCALED[0], "fp8_scaled_mm", "scaled_mm"
    started(sglang)
    method, weight, bias = sglang.method(target), torch.randn(N, K), torch.randn(N).bfloat16()
    layer, other = scaled_layer(weight, dtype), scaled_layer(torch.randn(N + 16, K), dtype)
    for x in (layer, other):
        method.process_weights_after_loading(x)
        assert x.processed_by_sglang
    ready.clear()
    for m in (1, 5):
        x = torch.randn(m, K).bfloat16()
        expected = x.float() @ weight.t() + bias.float()
        got = method.apply(layer, x, bias)
        assert got.dtype == torch.bfloat16
        assert float((got.float() - expected).abs().max() / expected.abs().max()) < 0.08
    assert sglang.products == []
    assert ours_ran() == {f"{op} cpp"}
    layer.weight_scale.data.mul_(2)  # update_weights: SGLang's own parameters are read
    torch.testing.assert_close(method.apply(layer, x), (2 * (got.float() - bias.float())).bfloat16(), atol=0.2, rtol=0.02)
    method.apply(other, x)
    assert sglang.products == [theirs]


def routed(tokens: int) -> Dispatched:
    """Return rows and their experts, of which a slot of the first token has none here."""
    weights, ids = torch.rand(tokens, 2), torch.stack([torch.randperm(4)[:2] for _ in range(tokens)]).int()
    ids[0, 1] = -1
    return Dispatched(torch.randn(tokens, 64), TopK(weights, ids))


def test_experts_with_tables_are_ours_for_every_number_of_tokens(sglang: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    started(sglang)
    method, layer = sglang.method(EXPERTS), experts_layer(4, 64, 48, 2)
    method.process_weights_after_loading(layer)
    assert layer.processed_by_sglang  # without tables
    assert "make one by: gemmtune.tune(gemmtune.Problem.grouped_mm(16, 64, 48, " in caplog.text
    for n, k in ((96, 64), (64, 48)):
        put_table(Problem.grouped_mm(16, n, k, groups=4, dtype=torch.float32, device_type="cpu"), [(1, 32, "cpp:")])
    layer = experts_layer(4, 64, 48, 2)
    method.process_weights_after_loading(layer)
    assert not hasattr(layer, "processed_by_sglang")  # it would pack the weights
    ready.clear()
    for tokens in (1, 5, 16):
        given = routed(tokens)
        (weights, ids, *_), x = given.topk_output, given.hidden_states
        gates, others = torch.einsum("tk,gnk->tgn", x, layer.w13_weight).chunk(2, -1)
        every = torch.einsum("tgi,gki->tgk", functional.silu(gates) * others, layer.w2_weight)
        each = every.gather(1, ids.clamp(min=0).long().unsqueeze(-1).expand(-1, -1, 64))
        expected = (each * torch.where(ids < 0, 0, weights).unsqueeze(-1)).sum(1)
        torch.testing.assert_close(method.apply(layer=layer, dispatch_output=given).hidden_states, expected)
    assert ours_ran() == {"grouped_mm cpp"}
    for other in ({"format": Standard.OTHER}, {"hidden_states_scale": torch.ones(())}):
        method.apply(layer, given._replace(**other))
        assert layer.applied_by_sglang
        del layer.applied_by_sglang
    sglang.invariant = True
    method.apply(layer, given)
    assert layer.applied_by_sglang


def test_experts_with_options_that_we_lack_stay_sglangs(sglang: StandIn) -> None:
    for n, k in ((96, 64), (64, 48)):
        put_table(Problem.grouped_mm(16, n, k, groups=4, dtype=torch.float32, device_type="cpu"), [(1, 32, "cpp:")])
    started(sglang)
    options = ({"activation": "gelu"}, {"routed_scaling_factor": 2.5}, {"gemm1_alpha": 1.7}, {"no_combine": True})
    layers = [(sglang.method(EXPERTS), experts_layer(4, 64, 48, 2, **option)) for option in options]
    method = sglang.method(EXPERTS)
    method.runner.runner_backend = Standard.OTHER
    for one, layer in (*layers, (method, experts_layer(4, 64, 48, 2))):
        one.process_weights_after_loading(layer)
        assert layer.processed_by_sglang
        assert one.apply(layer, routed(3)) is not None
        assert layer.applied_by_sglang


def test_a_version_with_other_experts_keeps_them(sglang: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    module, name = COMBINED.rsplit(".", 1)
    monkeypatch.delattr(sys.modules[module], name)
    started(sglang)
    assert f"gemmtune leaves layers of {EXPERTS} as they are" in caplog.text
    layer = experts_layer(4, 64, 48, 2)
    sglang.method(EXPERTS).process_weights_after_loading(layer)
    assert layer.processed_by_sglang
