"""Layers of experts of the plugin for vLLM, against a stand-in of vLLM: choices, numbers, and points that a version lacks."""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_stand_in as stand_in
from tables_of_rows import put_table
from torch.nn import functional
from vllm_stand_in import MOE, Backend, ExpertsConfig, ExpertsQuantization, Format, QuantKey, Scale, Shape, StandIn, run_experts

import gemmtune
import gemmtune.integration.vllm as plugin
from gemmtune import settings
from gemmtune.dispatch.ready import ready
from gemmtune.problem import Problem
from gemmtune.problem.rows import row_classes

Tensor = torch.Tensor
CONFIG = ExpertsConfig()
GROUPS, HIDDEN, INNER, COPIES = 4, 64, 48, 2
SIZES = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
ROWS = 32


@pytest.fixture
def vllm(own_store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[StandIn]:
    """A stand-in for vLLM on a CPU with our plugin, and tables in force."""
    caplog.set_level(logging.INFO, "vllm.gemmtune")
    with stand_in.on_cpu(monkeypatch) as made:
        plugin.register()
        yield made


def planted() -> None:
    """Store tables for both products of the layer, whose choices are ours."""
    for n, k in SIZES:
        put_table(Problem.grouped_mm(16, n, k, groups=GROUPS, dtype=torch.float32, device_type="cpu"), [(1, ROWS, "cpp:")])


def chosen(config: Any = CONFIG, *keys: Any) -> Any:
    """Return what vLLM chooses: by a module that imported the function before our plugin came, and for ``keys`` float8."""
    if keys:
        return sys.modules[f"{MOE}.oracle.fp8"].select_fp8_moe_backend(config, weight_key=keys[0], activation_key=keys[1])
    return sys.modules[f"{MOE}.method"].select_unquantized_moe_backend(moe_config=config)


def routing(tokens: int) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, of which the third has none, and their weights."""
    ids = torch.stack([torch.randperm(GROUPS - 1)[:COPIES] for _ in range(tokens)])
    return torch.where(ids == 2, 3, ids).int(), torch.rand(tokens, COPIES)


def reference(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, biases: Any = (None, None)) -> Tensor:
    """Compute experts token by token."""
    result = torch.zeros(x.shape[0], w2.shape[1])
    for t, c in ((t, c) for t in range(x.shape[0]) for c in range(ids.shape[1])):
        e = int(ids[t, c])
        if e < 0:
            continue
        bias1, bias2 = (0 if b is None else b[e] for b in biases)
        gates, others = (w1[e] @ x[t] + bias1).chunk(2)
        result[t] += weights[t, c] * (w2[e] @ (functional.silu(gates) * others) + bias2)
    return result


def test_experts_with_tables_are_ours_for_every_number_of_tokens(vllm: StandIn) -> None:
    planted()
    backend, kind = chosen()
    assert (backend, kind.__name__) == (Backend.TRITON, "GemmtuneExperts")
    assert kind.activation_format() is Format.Standard
    (key,) = vllm.config.additional_config["gemmtune"]
    assert key.startswith("GemmtuneExperts")
    w1, w2 = torch.randn(GROUPS, 2 * INNER, HIDDEN) / 8, torch.randn(GROUPS, HIDDEN, INNER) / 7
    biases = torch.randn(GROUPS, 2 * INNER), torch.randn(GROUPS, HIDDEN)
    made, biased = (kind(CONFIG, ExpertsQuantization(*pair)) for pair in ((None, None), biases))
    assert made.finalize_weight_and_reduce_impl() == "nothing"
    ready.clear()
    for tokens in (1, 3, 8, ROWS):
        x, (ids, weights) = torch.randn(tokens, HIDDEN), routing(tokens)
        given = (x, w1, w2, weights, ids)
        torch.testing.assert_close(run_experts(made, *given), reference(*given))
        torch.testing.assert_close(run_experts(biased, *given), reference(*given, biases))
        weighted = run_experts(made, *given, on_input=True)
        torch.testing.assert_close(weighted, reference(x, w1, w2, torch.ones_like(weights), ids))
        here = torch.tensor([1, -1, -1, 0])  # experts 3 and 0 are here
        some = run_experts(made, x, w1[[3, 0]], w2[[3, 0]], weights, ids, here)
        torch.testing.assert_close(some, reference(x, w1, w2, weights, torch.where(ids == 1, -1, ids)))
    assert {entry.plan.problem.m for entry in ready.values() if entry.plan.choice.backend == "cpp"} >= {2, 6, 16}


def test_experts_stay_vllms_for_a_reason_that_the_log_has(vllm: StandIn, monkeypatch: Any, caplog: Any) -> None:
    planted()
    batched = type("Batched", (), {"activation_format": lambda: Format.BatchedExperts})
    changes: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"moe_backend": "triton"}, {}, "its backend triton is asked for"),
        ({"is_lora_enabled": True}, {}, "LoRA"),
        ({"in_dtype": torch.float64}, {}, "inputs: got torch.float64"),
        ({}, {"theirs": batched}, "tokens come in batches of experts"),
        ({}, {"theirs": None}, "a layout of its own"),
        ({}, {"backend": Backend.OOT}, "its backend is OOT"),
    ]
    for config, others, text in changes:
        with monkeypatch.context() as changed:
            for name, value in others.items():
                changed.setattr(vllm, name, value)
            stand_in.log_once.cache_clear()
            assert chosen(dataclasses.replace(CONFIG, **config)) == (vllm.backend, vllm.theirs)
            assert text in caplog.messages[-1]
    assert vllm.config.additional_config == {}
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)
    assert chosen() == (vllm.backend, vllm.theirs)
    assert "batch-invariant" in caplog.messages[-1]


def test_the_log_names_what_makes_both_tables(vllm: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(dataclasses.replace(CONFIG, in_dtype=torch.float16)) == (vllm.backend, vllm.theirs)
    calls = [found[1] for line in caplog.messages if (found := re.search(r"gemmtune\.tune\((.*), m=(.*)\)$", line))]
    classes = [row_classes(eval(call, {"gemmtune": gemmtune, "torch": torch})) for call in calls]
    made = [Problem.grouped_mm(16, n, k, groups=GROUPS, dtype=torch.float16, device_type="cpu") for n, k in SIZES]
    assert classes == [row_classes(problem) for problem in made]
    assert all(line.endswith(f"m=range(1, {64 * COPIES + 1}))") for line in caplog.messages[-2:])


def key(*shape: int, static: bool = False) -> QuantKey:
    return QuantKey(Scale(Shape(*shape), static))


ROW, BLOCK = (key(-1, 1), key(1, -1)), (key(128, 128, static=True), key(1, 128))


@pytest.mark.parametrize(("scales", "keys"), [("row", ROW), ("block_128x128", BLOCK)])
def test_float8_experts_compute_their_scales(vllm: StandIn, scales: Any, keys: tuple[QuantKey, QuantKey], caplog: Any) -> None:
    hidden, inner = 256, 128
    config = dataclasses.replace(CONFIG, hidden_dim=hidden, intermediate_size_per_partition=inner, in_dtype=torch.bfloat16)
    assert chosen(config, *keys) == (vllm.backend, vllm.theirs)  # without tables
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        put_table(Problem.scaled_grouped_mm(16, n, k, groups=GROUPS, scales=scales, device_type="cpu"), [(1, ROWS, "cpp:")])
    backend, kind = chosen(config, *keys)
    assert (backend, kind.__name__) == (Backend.TRITON, "GemmtuneFP8Experts")
    assert chosen(config, key(-1, -1), key(-1, -1)) == (vllm.backend, vllm.theirs)
    assert "scales: got" in caplog.messages[-1]
    w1, w2 = torch.randn(GROUPS, 2 * inner, hidden) / 16, torch.randn(GROUPS, hidden, inner) / 11
    (q1, s1), (q2, s2) = (quantized(w, scales) for w in (w1, w2))
    made = kind(config, ExpertsQuantization(w1_scale=s1, w2_scale=s2, block_shape=[128, 128] if scales != "row" else None))
    ready.clear()
    x, (ids, weights) = torch.randn(7, hidden), routing(7)
    rows, scale = stand_in.rounded(x, None, torch.float8_e4m3fn, True, made.quant_config.block_shape)
    got = run_experts(made, rows, q1, q2, weights, ids, scale=scale, dtype=torch.bfloat16)
    expected = reference(x, w1, w2, weights, ids)
    assert float((got - expected).abs().max() / expected.abs().max()) < 0.1
    assert {(entry.plan.problem.op, entry.plan.choice.backend) for entry in ready.values()} == {("scaled_grouped_mm", "cpp")}


def quantized(w: Tensor, scales: str) -> tuple[Tensor, Tensor]:
    """Return weights [G, N, K] as float8 and their scales, as vLLM has them: [G, N, 1], or a number for each square."""
    side = (1, w.shape[2]) if scales == "row" else (128, 128)
    parts = w.unflatten(2, (-1, side[1])).unflatten(1, (-1, side[0]))
    scale = parts.abs().amax((2, 4)) / 448
    return (parts / scale[:, :, None, :, None]).reshape(w.shape).to(torch.float8_e4m3fn), scale


def test_a_version_without_a_point_of_experts_keeps_its_own(monkeypatch: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "vllm.gemmtune")
    with stand_in.on_cpu(monkeypatch) as vllm:
        planted()
        before = vllm.linear.apply
        points = [(module, name) for module, names in vllm.experts_contents.items() for name in names if "method" not in module]
        for module, name in points:
            with monkeypatch.context() as without:
                without.delattr(sys.modules[module], name)
                plugin.register()
            lack = f"gemmtune leaves experts of vLLM 0.0.stand.in as they are, because it lacks {module}.{name}"
            assert lack in caplog.messages
            assert chosen() == (vllm.backend, vllm.theirs)
        assert len(points) == 6
        assert vllm.linear.apply is not before
        monkeypatch.setattr(sys.modules[f"{MOE}.oracle.fp8"], "select_fp8_moe_backend", lambda config, more: None)
        plugin.register()
        lack = f"{MOE}.oracle.fp8.select_fp8_moe_backend(config, weight_key, activation_key)"
        assert any(line.endswith(lack) for line in caplog.messages)


def test_registers_once_and_a_switch_turns_it_off(vllm: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    select = sys.modules[f"{MOE}.oracle.unquantized"].select_unquantized_moe_backend
    plugin.register()
    assert sys.modules[f"{MOE}.oracle.unquantized"].select_unquantized_moe_backend is select
    with stand_in.on_cpu(monkeypatch) as other, settings.patch(vllm="0"):
        planted()
        plugin.register()
        assert chosen() == (other.backend, other.theirs)
