"""``optimize(batch_invariant=True)`` for experts of transformers: a token has its bits in any batch."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from extras import needs
from models import Needed, tokens
from test_invariant import SummingBackend, backend  # noqa: F401 - the fixture
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.errors import InvalidProblemError, NoValidChoicesError
from gemmtune.integration.experts import routers_of

pytestmark = [pytest.mark.slow, needs("models")]
transformers = Needed("transformers")
moe = Needed("transformers.integrations.moe")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16, "moe_intermediate_size": 16}


def model_of(name: str) -> Any:
    torch.manual_seed(1)
    more = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} if name == "GptOss" else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **EXPERTS, **more, head_dim=8)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def experts_of(model: torch.nn.Module) -> Any:
    return next(module for module in model.modules() if hasattr(module, "down_proj") and hasattr(module, "num_experts"))


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch, backend: SummingBackend) -> None:  # noqa: F811
    monkeypatch.setattr("gemmtune.integration.invariant.LEAST_ROWS", 2)
    backend.kinds = ("torch", "run")


class Weighted(nn.Module):
    """Module with a weight of these sizes."""

    def __init__(self, *size: int, **fields: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.__dict__ |= fields


def test_a_router_has_a_row_for_each_expert_beside_it():
    experts = {
        "num_experts": 4,
        "is_transposed": False,
        "has_gate": True,
        "has_bias": False,
        "down_proj": None,
        "gate_up_proj": None,
    }
    block = nn.ModuleDict(
        {
            "router": Weighted(4, 8), "experts": Weighted(1, **experts), "linear": nn.Linear(8, 4), "norm": Weighted(4),
            "three": Weighted(3, 8), "stacked": Weighted(4, 8, 2), "act": nn.ReLU(),
        }
    )  # fmt: skip
    assert routers_of(nn.ModuleList([block, Weighted(4, 8)])) == {block["router"]}
    del block["experts"]
    assert routers_of(block) == set()


@pytest.mark.rotates(3)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_a_token_has_its_bits_in_any_batch(name: str):
    """Mixtral and Qwen3 gate by halves. gpt-oss has biases, also in its router, gates of its own and transposed matrices."""
    model, ids = model_of(name), tokens(3, 4)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        gemmtune.optimize(model, tune={"input_ids": ids}, batch_invariant=True, progress=False)
        assert len(routers_of(model)) == 1
        whole = model(input_ids=ids).logits
        torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-4)
        for begin, end in ((0, 1), (2, 3), (1, 3)):
            assert torch.equal(model(input_ids=ids[begin:end]).logits, whole[begin:end]), (begin, end)
    gemmtune.restore(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.turn(0, 8)
def test_graphs_and_gradients_have_the_bits():
    importlib.import_module("gemmtune.integration.huggingface")
    model, ids = model_of("Mixtral"), tokens(3, 4)
    gemmtune.optimize(model, tune={"input_ids": ids}, batch_invariant=True, progress=False)
    experts = experts_of(model)
    torch.manual_seed(2)
    x, (weights, index) = torch.randn(12, 16), torch.randn(12, 4).softmax(-1).topk(2)
    index[5, 1] = 4  # the mark of another rank's expert
    with torch.no_grad():
        whole = experts(x, index, weights)
        with settings.patch(batch_invariant=True):
            assert torch.equal(moe.ALL_EXPERTS_FUNCTIONS["gemmtune"](experts, x[:3], index[:3], weights[:3]), whole[:3])
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True, dynamic=True)
        for m in (12, 7):
            assert torch.equal(compiled(x[:m], index[:m], weights[:m]), whole[:m]), m
    found = []
    for restored in (False, True):
        rows = x.clone().requires_grad_()
        if restored:
            gemmtune.restore(model)
            index, weights = index.clamp(max=3), weights * (index < 4)
        y = experts(rows, index, weights)
        assert restored or torch.equal(y, whole)
        experts.zero_grad()
        y.square().sum().backward()
        found.append((rows.grad, *(parameter.grad.clone() for parameter in experts.parameters())))
        of_rows = torch.func.grad(lambda *given: experts(*given).square().sum())(x, index, weights)
        torch.testing.assert_close(of_rows, rows.grad, atol=1e-6, rtol=1e-4)
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-4)


def test_experts_without_a_table_raise():
    model = model_of("Mixtral")
    with pytest.raises(InvalidProblemError, match="got m without example inputs for a model with experts"):
        gemmtune.optimize(model, m=range(1, 5), batch_invariant=True, progress=False)
    gemmtune.optimize(model, batch_invariant=True)
    with torch.no_grad(), pytest.raises(NoValidChoicesError, match=r"nothing is stored, and tune is .never.\nMake a table"):
        experts_of(model)(torch.randn(2, 16), torch.tensor([[0, 1], [2, 3]]), torch.rand(2, 2))
