"""Quantized models of transformers: quantized while they are loaded, saved, and loaded again."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
from extras import needs
from models import SMALL, Needed, made, result
from rotation import rotated
from safetensors.torch import load_file, save_file
from test_quantize import KINDS, close
from torch import nn

import gemmtune
from gemmtune import QuantizedWeight, settings

transformers = Needed("transformers")


@pytest.fixture(autouse=True)
def never(own_store):
    with settings.patch(tune="never"):
        yield


@pytest.mark.parametrize("name", rotated(["mixtral", "gpt_oss"], 2, "experts-saved"))
def test_experts_are_saved_quantized(name, tmp_path):
    model, inputs = made(name)
    model.save_pretrained(tmp_path / "plain")
    config = importlib.import_module("gemmtune.integration.huggingface").GemmtuneConfig("int8", skip="lm_head")
    loaded = type(model).from_pretrained(tmp_path / "plain", quantization_config=config)
    loaded.save_pretrained(tmp_path / "few")
    again = type(model).from_pretrained(tmp_path / "few")
    half = type(model).from_pretrained(tmp_path / "few", dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(result(again, inputs), result(loaded, inputs))
        assert close(result(half, inputs).float(), result(loaded, inputs), "float8")
    assert sum(isinstance(x, QuantizedWeight) and x.dim() == 3 for x in half.parameters()) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_quantize_save_and_load(kind, tmp_path):
    model, inputs = made("llama")
    model.save_pretrained(tmp_path / "plain")
    huggingface = importlib.import_module("gemmtune.integration.huggingface")
    config = huggingface.GemmtuneConfig(kind, group=32)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    gemmtune.quantize_(model, kind, group=32)
    with torch.no_grad():
        expected = result(model, inputs)
        assert torch.equal(result(loaded, inputs), expected)
        loaded.save_pretrained(tmp_path / "few")
        assert json.loads((tmp_path / "few/config.json").read_text())["quantization_config"]["kind"] == kind
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "few")
        assert torch.equal(result(again, inputs), expected)
        for load in (transformers.LlamaForCausalLM.from_pretrained, transformers.LlamaModel.from_pretrained):
            half = load(tmp_path / "few", dtype=torch.bfloat16)
            weight = getattr(half, "model", half).layers[0].mlp.up_proj.weight
            assert isinstance(weight, QuantizedWeight)
            assert {x.dtype for x in half.parameters()} == {torch.bfloat16}
            saved = again.model.layers[0].mlp.up_proj.weight
            assert torch.equal(weight.tensor.view(torch.uint8), saved.tensor.view(torch.uint8)), "another dtype is asked for"
    assert isinstance(again.model.layers[0].mlp.up_proj.weight, QuantizedWeight)


def test_transformers_load_a_saved_model_with_a_tied_head(tmp_path):
    huggingface = importlib.import_module("gemmtune.integration.huggingface")
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)).eval()
    llama.save_pretrained(tmp_path / "plain")
    config = huggingface.GemmtuneConfig("int8", skip=())
    with pytest.warns(RuntimeWarning, match="lm_head stays as it is: its weight is also model.embed_tokens.weight"):
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    loaded.save_pretrained(tmp_path / "few")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "few")
    assert type(again.lm_head.weight) is nn.Parameter
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert isinstance(again.model.layers[0].mlp.up_proj.weight, QuantizedWeight)
    with torch.no_grad():
        inputs = {"input_ids": torch.arange(7)[None]}
        assert torch.equal(result(again, inputs), result(loaded, inputs))


def saved_few(name: str, folder: Path, **options: object) -> tuple[nn.Module, Path]:
    """Return a model that transformers has quantized, and the folder where it has saved it."""
    huggingface = importlib.import_module("gemmtune.integration.huggingface")
    model, _ = made(name)
    model.save_pretrained(folder / "plain")
    few = type(model).from_pretrained(folder / "plain", quantization_config=huggingface.GemmtuneConfig("int4", group=32, **options))
    few.save_pretrained(folder / "few")
    return few, folder / "few"


def test_the_file_decides_which_weights_are_quantized(tmp_path):
    few, folder = saved_few("llama", tmp_path, skip=())
    model = transformers.LlamaForSequenceClassification.from_pretrained(folder, num_labels=6)
    assert type(model.score.weight) is nn.Parameter, "a new head is not in the file, and is trained"
    assert 0 < model.score.weight.std() < 0.1, "transformers initializes it"
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, QuantizedWeight)
    tensors = load_file(folder / "model.safetensors")
    stem = "model.layers.1.mlp.up_proj.weight"
    kept = {name: x for name, x in tensors.items() if not name.startswith(f"{stem}_")}
    save_file(kept | {stem: torch.ones(128, 64)}, folder / "model.safetensors", metadata={"format": "pt"})
    again = type(few).from_pretrained(folder)
    assert torch.equal(again.model.layers[1].mlp.up_proj.weight, torch.ones(128, 64))
    assert isinstance(again.model.layers[0].mlp.up_proj.weight, QuantizedWeight)


def test_a_damaged_file_is_refused(tmp_path, caplog):
    few, folder = saved_few("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    stem = "model.layers.1.mlp.up_proj.weight"
    numbers, scales = f"{stem}_int4_as_float32_t", f"{stem}_scales"
    logger = transformers.utils.logging.get_logger("transformers.modeling_utils")
    logger.parent.propagate, before = True, logger.parent.propagate
    for damaged, message in (
        ({name: x for name, x in tensors.items() if name != scales}, f"{stem}: got only int4_as_float32_t in the file, expected"),
        ({name: x for name, x in tensors.items() if name != numbers}, f"{stem}: got only scales in the file, expected numbers"),
        (
            tensors | {numbers: tensors[numbers][:64].clone(), scales: tensors[scales][:, :64].clone()},
            rf"{stem}: got \[64, 64\] in the file, expected \[128, 64\]; load the model with the configuration",
        ),
        (tensors | {scales: tensors[scales][:, :64].clone()}, "QuantizedWeight: scales: got shape"),
    ):
        save_file(damaged, folder / "model.safetensors", metadata={"format": "pt"})
        caplog.clear()
        with pytest.raises(RuntimeError, match="issues during automatic conversion"):
            type(few).from_pretrained(folder)
        assert re.search(message, caplog.text), message
    logger.parent.propagate = before


def test_modules_that_transformers_keeps_in_float32(tmp_path):
    huggingface = importlib.import_module("gemmtune.integration.huggingface")
    model, _ = made("t5")
    model.save_pretrained(tmp_path / "plain")
    config = huggingface.GemmtuneConfig("int8", skip="wi")
    few = type(model).from_pretrained(tmp_path / "plain", dtype=torch.float16, quantization_config=config)
    few.save_pretrained(tmp_path / "few")
    dtypes = {name: (type(x.data), x.dtype) for name, x in few.named_parameters()}
    assert dtypes["encoder.block.0.layer.1.DenseReluDense.wo.weight"] == (QuantizedWeight, torch.float32)
    for file in ("few",):
        again = type(model).from_pretrained(tmp_path / file, dtype=torch.float16)
        assert {name: (type(x.data), x.dtype) for name, x in again.named_parameters()} == dtypes
    other = transformers.T5EncoderModel.from_pretrained(tmp_path / "few", dtype=torch.float16)
    assert {name: (type(x.data), x.dtype) for name, x in other.named_parameters()}.items() <= dtypes.items()


@needs("accelerate")
def test_devices_are_planned_by_the_bytes_in_the_file(tmp_path):
    _, folder = saved_few("llama", tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, device_map="auto")
    sizes = {name: model.hf_quantizer.param_element_size(model, name, x) for name, x in model.named_parameters()}
    assert {name: size for name, size in sizes.items() if size != 4} == {
        name: 0.5 for name, x in model.named_parameters() if isinstance(x, QuantizedWeight)
    }
