"""Weights of public models: the products that a fleet tunes are those that the models call."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch
from extras import needs

import gemmtune
from gemmtune.errors import InvalidProblemError
from gemmtune.fleet.job import Job
from gemmtune.fleet.models import MODELS, Model, models_of, problems_of
from gemmtune.operand_kinds import ModelDtype
from gemmtune.problem.rows import RowClass, row_classes

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 272}
DECODER = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
TINY = {"hidden": 128, "intermediate": 256, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 272}
SPARSE = {"intermediate": 0, "experts": 4, "expert_intermediate": 256}
KINDS = {"bf16": None, "int4": "int4", "int8": "int8", "fp8": "float8"}
CASES = {
    "llama-3.1-8b": ("Llama", DECODER),
    "qwen2.5-7b": ("Qwen2", DECODER),
    "phi-4": ("Phi3", DECODER),
    "mixtral-8x7b": ("Mixtral", DECODER | EXPERTS),
    "gpt-oss-20b": ("GptOss", DECODER | EXPERTS | {"layer_types": ["full_attention"]}),
    "bert-base": ("Bert", SIZES),
}
"""Models of the table, and small models of the same architecture."""


def tiny(name: str) -> Model:
    """Return a model of the table with small sizes."""
    model = MODELS[name]
    sizes = TINY | (SPARSE if model.experts else {}) | ({"kv_heads": 4} if not model.gated else {})
    return dataclasses.replace(model, **sizes)  # type: ignore[arg-type]


def called(model: Any, kind: str | None) -> set[RowClass]:
    """Return the classes of the products of weights that a call of a quantized model computes."""
    if kind is not None:
        gemmtune.quantize_(model, kind)  # type: ignore[type-var]
    gemmtune.optimize(model)
    with gemmtune.record() as found, torch.no_grad():
        model(torch.arange(24)[None])
    return {x for p in found.problems("cpu") if not p.batched for x in row_classes(p)}


@needs("models")
@pytest.mark.filterwarnings("ignore:quantize_")
def test_a_fleet_tunes_what_the_models_call() -> None:
    """Only the fused forms are added, which need weights that lie next to each other."""
    transformers: Any = pytest.importorskip("transformers")
    for name, (family, sizes) in CASES.items():
        auto = transformers.AutoModelForMaskedLM if family == "Bert" else transformers.AutoModelForCausalLM
        for dtype in KINDS if name == "llama-3.1-8b" else ("bf16", "int4"):
            model = auto.from_config(getattr(transformers, f"{family}Config")(**sizes)).to(torch.bfloat16).eval()
            fused = {w.problem(dtype, "cpu") for w in tiny(name).weights() if w.fused}  # type: ignore[arg-type]
            ours = {x for p in problems_of([tiny(name)], [dtype], "cpu") for x in row_classes(p)}  # type: ignore[list-item]
            calls = called(model, KINDS[dtype])
            assert calls <= ours, (name, dtype)
            assert ours - calls <= {x for p in fused if p for x in row_classes(p)}, (name, dtype)


def test_every_model_has_a_table_in_each_dtype() -> None:
    dtypes: tuple[ModelDtype, ...] = get_args(ModelDtype)
    for name, model in MODELS.items():
        for dtype in dtypes:
            assert Job.tables(problems_of([model], [dtype], "cuda"), range(1, 8193)), (name, dtype)
    assert len(models_of(["all"])) == len(MODELS) > 40
    assert {w.n for w in MODELS["llama-3.1-8b"].weights()} == {4096, 1024, 6144, 14336, 28672, 128256}


def test_sizes_of_the_models_fit() -> None:
    """Each head of keys serves as many heads of queries. Other sizes are round numbers."""
    for name, x in MODELS.items():
        assert [x.heads % x.kv_heads, x.head_dim % 16, x.intermediate % 8, x.experts % 8] == [0] * 4, name
    assert [name for name, x in MODELS.items() if x.kv_heads == 1] == ["gemma-3-1b", "falcon-7b"]


def test_names_and_patterns_of_models() -> None:
    assert list(models_of(["Qwen3-*b"])) == [name for name in MODELS if name.startswith("qwen3-") and name.endswith("b")]
    with pytest.raises(InvalidProblemError, match=r"models: got 'llama', expected all, patterns .*, or some of llama-2-7b"):
        models_of(["bert-base", "llama"])
