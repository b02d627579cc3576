"""``experts_implementation="gemmtune"`` in models of transformers: values, gradients, tuning, compiled graphs, generation."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from typing import Any

import pytest
import torch
from extras import needs
from models import EXPERTS, Needed, made, result, tokens
from torch import nn

import gemmtune
import gemmtune.integration.experts
from gemmtune import settings
from gemmtune.errors import InvalidProblemError
from gemmtune.integration.quantize import dequantize_
from gemmtune.operators import kernels
from gemmtune.selector import defaults
from gemmtune.selector.segments import Table
from gemmtune.store.store import open_store

pytestmark = [pytest.mark.slow, needs("models")]
Tensor = torch.Tensor
transformers = Needed("transformers")
peft = Needed("peft")
moe = Needed("transformers.integrations.moe")
WAYS = ("eager", "grouped_mm", "gemmtune")


@pytest.fixture(autouse=True)
def registered(own_store):
    importlib.import_module("gemmtune.integration.huggingface")
    with settings.patch(backends=("aten",), search="quick"):
        yield


def qwen3_moe(activation: str = "silu") -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        **EXPERTS | {"num_experts": 4}, head_dim=16, moe_intermediate_size=32, hidden_act=activation
    )
    return transformers.Qwen3MoeForCausalLM(config).eval(), {"input_ids": tokens()}


def one_layer(name: str) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Return experts of a model, rows for them, and numbers and weights of the experts of each row."""
    model, _ = qwen3_moe() if name == "qwen3_moe" else made(name)
    experts = next(module for module in model.modules() if hasattr(module, "down_proj") and hasattr(module, "num_experts"))
    torch.manual_seed(2)
    weights, index = torch.randn(9, 4).softmax(-1).topk(2)
    return experts, torch.randn(9, 64), index, weights


def loss_and_gradients(model: nn.Module, given: Any, way: str) -> dict[str, Tensor]:
    model.set_experts_implementation(way)
    model.zero_grad()
    found = model(**given, labels=given["input_ids"])
    found.loss.backward()
    return {"logits": found.logits.detach()} | {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "silu", "gelu", "gelu_pytorch_tanh", "gelu_new"])
def test_values_and_gradients_are_those_of_transformers(name):
    """Mixtral and Qwen3 gate by halves, gpt-oss has biases, interleaved gates and transposed matrices."""
    model, given = made(name) if name in ("mixtral", "gpt_oss") else qwen3_moe(name)
    eager, torchs, ours = (loss_and_gradients(model, given, way) for way in WAYS)
    for key, expected in eager.items():
        close = 2e-6 + 2 * (torchs[key] - expected).abs().max()
        assert (ours[key] - expected).abs().max() <= close, f"{key}: got another value than eager experts"


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_numbers_of_experts_elsewhere_count_for_nothing(name):
    experts, x, index, weights = one_layer(name)
    index, weights = index.clone(), weights.clone()
    index[::2, 1], weights[::2, 1] = experts.num_experts, 0.0  # the mark of another rank's expert
    experts._is_expert_parallel = True  # from transformers 5.24 on, without which it counts no experts elsewhere
    found = {}
    for way in WAYS[1:]:
        rows = x.clone().requires_grad_()
        junk = [torch.full((18, 128), float("nan")) for _ in range(9)]
        del junk  # memory that the next tensors get
        y = moe.ALL_EXPERTS_FUNCTIONS[way](experts, rows, index, weights)
        experts.zero_grad()
        y.sum().backward()
        found[way] = (y.detach(), rows.grad, *(parameter.grad.clone() for parameter in experts.parameters()))
    for ours, expected in zip(found["gemmtune"], found["grouped_mm"], strict=True):
        assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_norm_of_each_expert_is_applied_and_an_unknown_step_is_an_error(name, monkeypatch):
    """Experts of transformers 5.24 may have a norm. The stand-in divides by a sum, which shows a row that was left out."""
    experts, x, index, weights = one_layer(name)
    each = [moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, x, index[:, i : i + 1], torch.ones(9, 1)) for i in (0, 1)]
    experts.has_post_expert_norm, experts.post_expert_norm = True, lambda rows: rows / rows.abs().sum(-1, keepdim=True).clamp(1e-9)
    expected = sum(weights[:, i : i + 1] * experts.post_expert_norm(rows) for i, rows in enumerate(each))
    monkeypatch.setattr(gemmtune.integration.experts, "invariant_grouped", lambda *given: gemmtune.grouped_mm(*given[:3]))
    for run in (moe.ALL_EXPERTS_FUNCTIONS["gemmtune"], gemmtune.integration.experts.invariant_experts):
        experts.has_later_step = False
        torch.testing.assert_close(run(experts, x, index, weights), expected, atol=1e-5, rtol=1e-4)
        experts.has_later_step = True
        with pytest.raises(InvalidProblemError, match=r'got experts with has_later_step, .*experts_implementation="grouped_mm"'):
            run(experts, x, index, weights)


def test_a_graph_leaves_out_no_step_of_later_experts():
    """Graphs of torch 2.11 cannot list the attributes of a module."""
    experts, *given = one_layer("mixtral")

    class Later(type(experts)):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.__dict__ |= vars(experts)
            self.has_later_step = True

    by_picks = gemmtune.integration.experts.experts_by_picks

    def run(module):
        return by_picks(module, *given)

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(experts), run(experts))
    with pytest.raises(InvalidProblemError, match="got experts with has_later_step"):
        torch.compile(run, backend="eager")(Later())


def test_a_call_tunes_nothing_and_optimize_tunes_what_it_needs():
    model, given = made("mixtral")
    model.set_experts_implementation("gemmtune")
    with torch.no_grad():
        expected = result(model, given)
        store = open_store(settings.current())
        assert not store.every_row(), "a forward measured something"
        gemmtune.optimize(model, tune=given, progress=False)
        ops = {json.loads(row.key)["op"] for row in store.every_row()}
        assert {"routed_grouped_mm", "combined_grouped_mm"} <= ops
        assert torch.allclose(result(model, given), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_quantized_experts_have_the_values_of_grouped_mm(kind):
    model, given = made("mixtral")
    gemmtune.quantize_(model, kind)
    with torch.no_grad():
        expected, found = (result(_with(model, way), given) for way in WAYS[1:])
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.turn(2, 8)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_quantized_experts_on_a_cpu_need_no_tuning(name, monkeypatch):
    """Experts divide the rows among them: so many times the rows of the rule run by the compiled kernel, in one product."""
    monkeypatch.setattr(defaults, "RULE_ON_CPU", ((4, ("cpp:",)), (64, ())))
    model, given = made(name)
    gemmtune.quantize_(_with(model, "gemmtune"), "int8")
    few = {"input_ids": given["input_ids"][:1, :7]}
    with torch.no_grad(), settings.patch(backends=("aten", "cpp"), rows="shared"):
        expected = [result(model, x) for x in (few, given)]
        gemmtune.optimize(model, progress=False)
        tables = [x for x in open_store(settings.current()).every_ranged() if json.loads(x.key)["op"] == "mixed_grouped_mm"]
        ran = Counter()
        run = kernels.run_unchecked
        monkeypatch.setattr(kernels, "run_unchecked", lambda call: ran.update([call.name]) or run(call))
        found = [result(model, x) for x in (few, given)]
    kinds = [[(x.backend, x.lo, x.hi, x.checked) for x in Table.of(table).segments] for table in tables]
    assert kinds == [[("cpp", 1, 16, (16,)), ("aten", 17, 256, ())]] * 2
    assert set(ran) == {"mixed_grouped_mm"}, "experts were multiplied one by one"
    for ours, torchs in zip(found, expected, strict=True):
        assert torch.allclose(ours, torchs, atol=1e-4)


def test_experts_in_floats_stay_torchs_on_a_cpu():
    model, given = made("mixtral")
    with torch.no_grad(), settings.patch(backends=("aten", "cpp"), rows="shared"):
        expected = result(_with(model, "grouped_mm"), given)
        assert torch.equal(result(gemmtune.optimize(model, progress=False), given), expected)
        assert torch.allclose(result(_with(model, "gemmtune"), given), expected, atol=1e-5)
        store = open_store(settings.current())
    assert not store.every_row()
    assert not store.every_ranged()


def _with(model: Any, way: str) -> Any:
    model.set_experts_implementation(way)
    return model


@pytest.mark.turn(3, 8)
def test_compiled_experts_and_their_gradients():
    """Compiled grouped products of transformers have gradients in bfloat16 only."""
    experts, *given = one_layer("qwen3_moe")
    forward = moe.ALL_EXPERTS_FUNCTIONS["gemmtune"]
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(experts, *given), forward(experts, *given), atol=1e-5)
    experts.bfloat16()
    results = []
    for function in (forward, compiled):
        rows = given[0].bfloat16().requires_grad_()
        y = function(experts, rows, *given[1:])
        y.square().sum().backward()
        results.append((y.detach(), rows.grad))
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=0.03, atol=0.03 * expected.abs().max())


def test_generate_gives_the_same_tokens():
    model, given = made("mixtral")
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(given["input_ids"]), "pad_token_id": 0}
    expected, found = (_with(model, way).generate(**given, **options) for way in ("eager", "gemmtune"))
    assert torch.equal(found, expected)


def test_continuous_batching_gives_the_same_tokens():
    model, given = made("mixtral")
    batching = Needed("transformers.generation.configuration_utils").ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    options = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    expected = _with(model, "eager").generate(
        **given, generation_config=options, attention_mask=torch.ones_like(given["input_ids"])
    )
    found = _with(model, "gemmtune").generate_batch(
        given["input_ids"].tolist(), generation_config=options, continuous_batching_config=batching, warmup=False
    )
    assert [x.error for x in found.values()] == [None, None]
    assert [x.generated_tokens for x in found.values()] == expected[:, given["input_ids"].shape[1] :].tolist()


@needs("peft")
@pytest.mark.parametrize("kind", ["", "int8"])
def test_adapters_of_experts_are_trained_and_merged(kind):
    model, given = made("mixtral")
    if kind:
        gemmtune.quantize_(model, kind)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(_with(model, "gemmtune"), config)
    optimizer, losses = torch.optim.AdamW([x for x in adapted.parameters() if x.requires_grad], lr=0.01), []
    for _ in range(3):
        loss = adapted(**given, labels=given["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    with torch.no_grad():
        expected = result(adapted.eval(), given)
        merged = (dequantize_(adapted) if kind else adapted).merge_and_unload()
        assert torch.allclose(result(merged, given), expected, atol=1e-5)
