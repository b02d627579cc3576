"""Other packages with optimized and quantized models: transformers' Trainer, peft, accelerate and Lightning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from extras import needs
from models import Needed, accelerate, made, result, transformers
from torch import nn

import gemmtune
from gemmtune import QuantizedWeight, settings
from gemmtune.errors import InvalidProblemError
from gemmtune.integration.modules import is_optimized
from gemmtune.integration.quantize import dequantize_, flatten_state_dict, unflatten_state_dict

pytestmark = [pytest.mark.slow, needs("models")]
Tensor = torch.Tensor
peft = Needed("peft")
safetensors = Needed("safetensors.torch")
lightning = Needed("lightning")


@pytest.fixture(autouse=True)
def quick(own_store):
    with settings.patch(backends=("aten",), search="quick"):
        yield


def llama(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model of this kind, and inputs for it: plain, optimized, or quantized and optimized."""
    model, given = made("llama")
    if kind in ("int8", "int4", "float8"):
        gemmtune.quantize_(model, kind, group=32)
    if kind != "plain":
        gemmtune.optimize(model, tune=given, progress=False)
        assert any(map(is_optimized, model.modules()))
    return model, dict(given)


def with_adapters(model: nn.Module) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def losses(model: nn.Module, given: dict[str, Tensor], wrap=lambda *x: x) -> list[float]:
    """Train by the optimizer that Trainer takes, and return the loss of each step."""
    model, optimizer = wrap(model, torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=0.01, fused=True))
    found = []
    for _ in range(3):
        loss = model(**given, labels=given["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found[2] < found[0]
    return found


def trained(model: nn.Module, given: dict[str, Tensor], folder: Any) -> tuple[list[float], Any]:
    """Train by Trainer with gradient checkpointing, and return the loss of each step and the Trainer."""
    options = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=3, learning_rate=0.01, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in given["input_ids"]] * 4
    trainer = transformers.Trainer(model=model, args=options, train_dataset=rows)
    trainer.train()
    optimizer = trainer.optimizer.optimizer if hasattr(trainer.optimizer, "optimizer") else trainer.optimizer
    assert optimizer.defaults["fused"]
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


@pytest.mark.turn(5, 8)
def test_trainer_trains_and_saves_an_optimized_model(tmp_path):
    expected, _ = trained(*llama("plain"), tmp_path / "plain")
    model, given = llama("optimized")
    found, trainer = trained(model, given, tmp_path / "optimized")
    assert found == pytest.approx(expected, rel=1e-4)
    trainer.save_model(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(result(again, given), result(model.eval(), given))


@needs("peft")
def test_trainer_trains_adapters_of_a_quantized_model(tmp_path):
    config = Needed("gemmtune.integration.huggingface").GemmtuneConfig
    plain, given = made("llama")
    plain.save_pretrained(tmp_path / "plain")
    model, bare = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config("int8")) for _ in range(2)
    )
    found, _ = trained(with_adapters(gemmtune.optimize(model)), dict(given), tmp_path / "run")
    assert found[2] < found[0]
    with pytest.raises(ValueError, match="attach trainable adapters"):
        trained(bare, dict(given), tmp_path / "run")


@needs("peft")
@pytest.mark.parametrize("kind", ["optimized", "int8", "int4"])
def test_adapters_are_found_trained_saved_and_merged(kind, tmp_path):
    base, given = llama(kind)
    frozen = {name: x.clone() for name, x in base.state_dict().items()}
    model = with_adapters(base)
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert len(layers) == 14, "each linear layer, but for the head"
    if kind == "optimized":
        assert losses(model.train(), given) == pytest.approx(losses(with_adapters(made("llama")[0]).train(), given), rel=1e-4)
    else:
        losses(model.train(), given)
    for name, x in base.state_dict().items():
        if "lora" not in name:
            before = frozen[name.replace(".base_layer", "").replace("base_model.model.", "")]
            assert torch.equal(x.dequantize() if isinstance(x, QuantizedWeight) else x,
                               before.dequantize() if isinstance(before, QuantizedWeight) else before), name  # fmt: skip
    with torch.no_grad():
        expected = result(model.eval(), given)
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(llama(kind)[0], tmp_path).eval()
        assert torch.equal(result(again, given), expected)
        if kind != "optimized":
            with pytest.raises(InvalidProblemError, match=r"dequantize\(\) the weight, change the floats and quantize them again"):
                copy.deepcopy(model).merge_and_unload()
            dequantize_(model)
        merged = model.merge_and_unload()
        assert not any("lora" in name for name, _ in merged.named_parameters())
        assert torch.allclose(result(merged, given), expected, atol=1e-5)


@pytest.mark.turn(2, 8)
def test_accelerate_prepares_optimized_models_and_saves_quantized_ones(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    expected = losses(*llama("plain"))
    model, given = llama("optimized")
    assert losses(model, given, accelerator.prepare) == pytest.approx(expected, rel=1e-4)
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    quantized, _ = llama("int8")
    with pytest.raises(InvalidProblemError, match=r"storage: got a QuantizedWeight of shape .*flatten_state_dict .*torch\.save"):
        accelerator.save_model(quantized, tmp_path / "refused")
    accelerator.save_model(quantized, tmp_path / "pickled", safe_serialization=False)
    state = torch.load(tmp_path / "pickled" / "pytorch_model.bin", weights_only=True)
    safetensors.save_file(flatten_state_dict(quantized.state_dict()), tmp_path / "flat.safetensors")
    for found in (state, unflatten_state_dict(safetensors.load_file(tmp_path / "flat.safetensors"))):
        again, _ = llama("int8")
        again.load_state_dict({name: x.clone() for name, x in found.items()})
        assert torch.equal(result(again, given), result(quantized, given))


@needs("lightning")
def test_lightning_fits_an_optimized_model_and_adapters_of_a_quantized_one(tmp_path):
    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.losses = model, []

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss = self.model(input_ids=batch, labels=batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW((x for x in self.parameters() if x.requires_grad), lr=0.01)

    def fitted(model: nn.Module, given: dict[str, Tensor]) -> list[float]:
        module = Module(model.train())
        trainer = lightning.Trainer(
            default_root_dir=tmp_path, max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(list(given["input_ids"]) * 3, batch_size=2))
        assert module.losses[2] < module.losses[0]
        return module.losses

    expected = fitted(*llama("plain"))
    assert fitted(*llama("optimized")) == pytest.approx(expected, rel=1e-4)
    model, given = llama("int8")
    fitted(with_adapters(model), given)


def offloaded(model: nn.Module, how: str, folder: Any) -> nn.Module:
    """Let accelerate keep weights elsewhere and bring each to its layer."""
    cpu = torch.device("cpu")
    if how == "cpu":
        return accelerate.cpu_offload(model, cpu)
    if how == "disk":
        return accelerate.disk_offload(model, str(folder), cpu)
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    return accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)


@pytest.mark.rotates(9)
@pytest.mark.parametrize("how", ["cpu", "disk", "map"])
@pytest.mark.parametrize("kind", ["optimized", "int8", "int4"])
def test_accelerate_offloads(kind, how, tmp_path):
    model, given = llama(kind)
    with torch.no_grad():
        expected = result(model, given)
        if kind != "optimized" and how == "disk":
            with pytest.raises(InvalidProblemError, match="numpy: got a QuantizedWeight"):
                offloaded(model, how, tmp_path)
            return
        offloaded(model, how, tmp_path)
        for _ in range(2):
            assert torch.equal(result(model, given), expected)
        assert torch.allclose(result(gemmtune.restore(model), given), expected, atol=1e-5)


def test_accelerate_tells_tied_quantized_weights_from_others():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model[2].weight = model[0].weight
    gemmtune.quantize_(model, "int8")
    x = torch.randn(4, 64)
    expected = model(x)
    first, second, tied = (layer.weight.data_ptr() for layer in model)
    assert first == tied != second
    accelerate.dispatch_model(model, {"0": "cpu", "1": "cpu", "2": "cpu"}, main_device="cpu", force_hooks=True)
    assert torch.equal(model(x), expected)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert torch.equal(model(x), expected)
