"""Tiny models with random weights: layers of all kinds that real ones have, none downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Needed:
    """A package that is imported when a test uses its first name. Without it that test is skipped.

    While pytest collects, it looks for private names in whatever a module has: these import and skip nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and "PYTEST_CURRENT_TEST" not in os.environ:
            raise AttributeError(name)
        package = pytest.importorskip(self._name, reason="the extra 'models' installs it")
        return getattr(package, name)


transformers = Needed("transformers")
accelerate = Needed("accelerate")

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
Inputs = Mapping[str, Tensor]


def tokens(rows: int = 2, length: int = 7) -> Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(rows))


def noise(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(5))


def mlp() -> tuple[nn.Module, Inputs]:
    layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False))
    return layers, {"input": noise(2, 5, 64)}


def llama() -> tuple[nn.Module, Inputs]:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens()}


def qwen2() -> tuple[nn.Module, Inputs]:
    config = transformers.Qwen2Config(**SMALL, num_key_value_heads=2)
    return transformers.Qwen2ForCausalLM(config), {"input_ids": tokens()}


def bert() -> tuple[nn.Module, Inputs]:
    return transformers.BertModel(transformers.BertConfig(**SMALL)), {"input_ids": tokens()}


def gpt2() -> tuple[nn.Module, Inputs]:
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=32)
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens()}


def vit() -> tuple[nn.Module, Inputs]:
    config = transformers.ViTConfig(**{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=32, patch_size=8)
    return transformers.ViTModel(config), {"pixel_values": noise(2, 3, 32, 32)}


def whisper() -> tuple[nn.Module, Inputs]:
    config = transformers.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, vocab_size=96, num_mel_bins=16, max_source_positions=20, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperModel(config), {"input_features": noise(2, 16, 40), "decoder_input_ids": tokens()}


def t5() -> tuple[nn.Module, Inputs]:
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=96, decoder_start_token_id=0
    )
    return transformers.T5Model(config), {"input_ids": tokens(), "decoder_input_ids": tokens()}


EXPERTS = SMALL | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}


def mixtral() -> tuple[nn.Module, Inputs]:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**EXPERTS)), {"input_ids": tokens()}


def gpt_oss() -> tuple[nn.Module, Inputs]:
    """Experts with biases, whose matrices are the other way round."""
    config = transformers.GptOssConfig(**EXPERTS, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    return transformers.GptOssForCausalLM(config), {"input_ids": tokens()}


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "mlp": mlp, "llama": llama, "qwen2": qwen2, "bert": bert, "gpt2": gpt2, "vit": vit, "whisper": whisper, "t5": t5,
    "mixtral": mixtral, "gpt_oss": gpt_oss,
}  # fmt: skip


def made(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Inputs]:
    """A model in evaluation mode, with weights that are the same in every run, and inputs for it."""
    torch.manual_seed(1)
    model, inputs = MODELS[name]()
    return model.eval().to(dtype), {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def result(model: nn.Module, inputs: Inputs) -> Tensor:
    """The model's first result."""
    found = model(**inputs)
    return found if isinstance(found, Tensor) else found[0]
