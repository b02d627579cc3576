"""Small models of transformers with random weights, and a package compiled ahead of time. Each run tests one of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_graphs import FixedPolicy, Mlp, assert_as_good, decided, in_float64
from models import made as made_model
from models import result
from rotation import rotated

import gemmtune
from gemmtune.integration.compile import backend

transformers = pytest.importorskip("transformers", reason="the models come from transformers, which the extra 'models' installs")

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 40, "max_position_embeddings": 32}


def llama() -> Any:
    config = transformers.LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def qwen2() -> Any:
    config = transformers.Qwen2Config(**SIZES, intermediate_size=64, num_key_value_heads=2)
    return transformers.Qwen2ForCausalLM(config)


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**SIZES, intermediate_size=64))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=40, n_positions=32))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch):
    """Install a policy that rewrites every GEMM with its epilogue. Yield the decisions."""
    backend.install(policy=FixedPolicy("fused"))
    with decided() as made:
        yield made
    backend.uninstall()


def compiled_is_right(build: Callable[[], Any], made: list[Any], folder: Path) -> None:
    """Compare logits of two lengths in one dynamic graph with eager torch and float64. Every product must be ours."""
    torch.manual_seed(0)
    model = build().eval().bfloat16()
    exact = in_float64(model)
    compiled = torch.compile(model, dynamic=True)
    with torch.no_grad():
        for length in (5, 9):
            tokens = torch.randint(0, 40, (2, length))
            got, eager, truth = ([x(tokens, use_cache=False)[0]] for x in (compiled, model, exact))
            assert_as_good(got, eager, truth)
    linears = sum(isinstance(m, torch.nn.Linear | transformers.pytorch_utils.Conv1D) for m in model.modules())
    taken = [d for d in made if d.taken]
    assert len(taken) >= linears
    assert not [d for d in made if not d.taken and "K is 1" not in d.reason]
    assert len(gemmtune.explain(compiled).decisions) == len(made)


def ahead_of_time(made: list[Any], folder: Path) -> None:
    """Check that a package that Inductor compiled to C++ calls the operator."""
    model, x = Mlp(), torch.randn(2, 3, 24)
    with torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=str(folder / "mlp.pt2"))
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), model(x))
    assert [d.taken for d in made] == ["fused", "alone"]


def quantized(name: str, made: list[Any], folder: Path) -> None:
    """Check that a model with int4 weights has the same result compiled and uncompiled."""
    model, inputs = made_model(name)
    gemmtune.quantize_(model, "int4", group=32)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", dynamic=True)
        assert torch.allclose(result(compiled, inputs), result(model, inputs), atol=1e-5)


CHECKS: dict[str, Callable[[list[Any], Path], None]] = {
    **{build.__name__: functools.partial(compiled_is_right, build) for build in (llama, qwen2, bert, gpt2)},
    **{f"{name}-int4": functools.partial(quantized, name) for name in ("llama", "qwen2", "gpt2")},
    "ahead_of_time": ahead_of_time,
}


PICKED = rotated(tuple(CHECKS), every=len(CHECKS), name="models")


@pytest.mark.parametrize("check", [CHECKS[name] for name in PICKED], ids=PICKED)
def test_models(check, fused, tmp_path):
    check(fused, tmp_path)
