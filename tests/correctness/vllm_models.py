"""Tiny models for vLLM, written here: a config alone, or weights in bfloat16, also of experts, or in the layout of GPTQ or AWQ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HIDDEN, INNER, LAYERS, VOCABULARY, HEADS, KEY_HEADS, HEAD = 256, 512, 2, 512, 4, 2, 64
GROUP = 32
EXPERTS, OF_TOKEN = 8, 2
WEIGHTS = ((512, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
"""Sizes [N, K] of the weights that vLLM multiplies by: qkv and the last layer, output, gate and up, down."""
MLP = {"mlp.gate_proj": (HIDDEN, INNER), "mlp.up_proj": (HIDDEN, INNER), "mlp.down_proj": (INNER, HIDDEN)}
EXPERT_WEIGHTS = WEIGHTS[2:]
"""Sizes [N, K] of an expert's weights: gate and up, down."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write_config(folder: Path, quantization: dict[str, Any] | None = None, *, experts: bool = False) -> Path:
    """Write the config of a model, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": HEAD,
        "vocab_size": VOCABULARY, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    config |= {"quantization_config": quantization} if quantization else {}
    if experts:
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": OF_TOKEN, "sliding_window": None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_model(folder: Path, method: str = "", *, widened: bool = False) -> Path:
    """Write a checkpoint whose layers all show in its tokens.

    Its weights are bfloat16, or of four bits by ``gptq`` (symmetric) or ``awq`` (with zero points), or ``experts`` stand in place
    of its MLPs. ``widened`` writes those of four bits in bfloat16, which has them exactly. vLLM's own ``dummy`` weights are so
    small that a wrong product changes no token.
    """
    from safetensors.torch import save_file

    weights, draw = dict[str, torch.Tensor](), torch.Generator().manual_seed(5)
    size, experts = HEADS * HEAD, method == "experts"
    method = "" if experts else method
    layer = {
        "self_attn.q_proj": (HIDDEN, size), "self_attn.k_proj": (HIDDEN, size // 2), "self_attn.v_proj": (HIDDEN, size // 2),
        "self_attn.o_proj": (size, HIDDEN),
    }  # fmt: skip
    layer |= _experts() if experts else MLP
    for i in range(LAYERS):
        for name, (k, n) in layer.items():
            parts = _int4(method, k, n, draw, widened) if method else {"weight": _normal(n, k, draw) / k**0.5}
            weights |= {f"model.layers.{i}.{name}.{part}": x for part, x in parts.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{i}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights["model.embed_tokens.weight"] = _normal(VOCABULARY, HIDDEN, draw)
    weights["lm_head.weight"] = _normal(VOCABULARY, HIDDEN, draw) / 16
    write_config(folder, None if widened else _quantization(method), experts=experts)
    save_file(weights, folder / "model.safetensors")
    return folder


def _experts() -> dict[str, tuple[int, int]]:
    moe, sizes = "block_sparse_moe", {"w1": (HIDDEN, INNER), "w2": (INNER, HIDDEN), "w3": (HIDDEN, INNER)}
    named = {f"{moe}.experts.{expert}.{name}": size for expert in range(EXPERTS) for name, size in sizes.items()}
    return {f"{moe}.gate": (HIDDEN, EXPERTS), **named}


def _quantization(method: str) -> dict[str, Any] | None:
    if not method:
        return None
    words = {"desc_act": False, "sym": True} if method == "gptq" else {"zero_point": True, "version": "gemm"}
    return {"quant_method": method, "bits": 4, "group_size": GROUP, **words}


def _normal(rows: int, columns: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, generator=draw).bfloat16()


def _int4(method: str, k: int, n: int, draw: torch.Generator, widened: bool) -> dict[str, torch.Tensor]:
    numbers = torch.randint(0, 16, (k, n), generator=draw)
    scales = torch.randint(5, 16, (k // GROUP, n), generator=draw).bfloat16() / 2**10  # four bits: products fit bfloat16
    zeros = torch.full((k // GROUP, n), 7) if method == "gptq" else torch.randint(4, 12, (k // GROUP, n), generator=draw)
    if widened:
        beyond = zeros + (method == "gptq")  # GPTQ stores one less
        return {"weight": ((numbers - beyond.repeat_interleave(GROUP, 0)) * scales.repeat_interleave(GROUP, 0)).t().contiguous()}
    if method == "gptq":
        group_of = (torch.arange(k) // GROUP).to(torch.int32)
        qweight = in_words(numbers.t(), range(8)).t().contiguous()
        return {"qweight": qweight, "qzeros": in_words(zeros, range(8)), "scales": scales, "g_idx": group_of}
    return {"qweight": in_words(numbers, AWQ_ORDER), "qzeros": in_words(zeros, AWQ_ORDER), "scales": scales}


def in_words(numbers: torch.Tensor, order: Sequence[int], bits: int = 4) -> torch.Tensor:
    """Return [R, C] numbers as int32 [R, C·bits/32]. The j-th lowest bits of a word are column order[j] of its columns."""
    count, words = 32 // bits, numbers.to(torch.int64)
    return sum((words[:, column::count] << (bits * place) for place, column in enumerate(order)), torch.tensor(0)).to(torch.int32)
