"""``from_pretrained(..., quantization_config=...)`` of transformers. Users import this module, because it imports transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..quantized.weight import QuantizedWeight
from .quantize import Bits, check_kind, flat_parts, flatten_state_dict, is_part, names_of, quantize_, unflatten_state_dict

METHOD = "gemmtune"


@register_quantization_config(METHOD)
class GemmtuneConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Configuration to quantize a model while it is loaded, with the arguments of ``quantize_``.

        AutoModel.from_pretrained(name, quantization_config=GemmtuneConfig("int4"))

    ``save_pretrained`` saves the quantized weights, and ``from_pretrained`` loads them.
    """

    def __init__(self, kind: Bits = "int4", group: int = 128, skip: Any = ("lm_head",), **_: Any) -> None:
        check_kind(kind, group)
        self.quant_method = METHOD
        self.kind, self.group, self.skip = kind, group, names_of(skip)


@register_quantizer(METHOD)
class GemmtuneQuantizer(HfQuantizer):  # type: ignore[misc]
    """Hooks that transformers calls while it loads and saves a model with a ``GemmtuneConfig``."""

    requires_calibration = False
    is_compileable = True
    is_trainable = True
    """True because adapters can be trained. Without any, transformers' Trainer refuses a quantized model."""

    def is_serializable(self, **_: Any) -> bool:
        """Return True: the weights are saved as plain tensors."""
        return True

    def _process_model_before_weight_loading(self, model: nn.Module, checkpoint_files: Any = None, **_: Any) -> nn.Module:
        if not self.pre_quantized:
            return model
        ties: Any = model.all_tied_weights_keys
        for target, source in ties.items():  # transformers ties them after loading
            place, _, name = target.rpartition(".")
            setattr(model.get_submodule(place), name, model.get_parameter(source))
        self._dtypes = {name: x.dtype for name, x in self._quantized(model).named_parameters()}
        return _split(model, _saved_names(checkpoint_files or ()))

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        # Some checkpoints have a matrix for each expert. Quantized experts are saved together, not split again.
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [x for x in conversions if not isinstance(x, WeightConverter)]  # type: ignore[assignment]
        return _put_together(model, self._dtypes) if self.pre_quantized else self._quantized(model)

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the saved tensors by name, and no metadata."""
        return flatten_state_dict(model.state_dict()), {}

    def _quantized(self, model: nn.Module) -> nn.Module:
        config = self.quantization_config
        return quantize_(model, config.kind, group=config.group, skip=config.skip)


def _saved_names(files: Sequence[str]) -> list[str]:
    """Return the names of all tensors in the safetensors files."""
    names: list[str] = []
    for file in files:
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                names += opened.keys()
    return names


def _split(model: nn.Module, saved: Sequence[str]) -> nn.Module:
    """Replace each quantized weight by Parameters for its parts, which transformers loads like any others. Return the model.

    The numbers get the name that they have in the file, which includes the dtype of the saved weight.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    known = {name.removeprefix(prefix).partition("_as_")[0]: name.rpartition(".")[2] for name in saved if "_as_" in name}
    # Modules may have had other names when the checkpoint was saved. Then the name in any module counts.
    known = {stem.rpartition(".")[2]: name for stem, name in known.items()} | known
    for place, module in model.named_modules():
        for own, weight in list(module._parameters.items()):
            if not isinstance(weight, QuantizedWeight):
                continue
            module._parameters[own] = None
            if own != "weight":  # experts are otherwise initialized, though their weight is None
                module._is_hf_initialized = True
            for part, x in flat_parts(weight).items():
                name = f"{own}_{part}"
                stem = f"{place}.{name}".removeprefix(prefix).partition("_as_")[0]
                found = known.get(stem) or known.get(stem.rpartition(".")[2], name)
                module.register_parameter(found, nn.Parameter(x, requires_grad=False))
    return model


def _put_together(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> nn.Module:
    """Undo ``_split``, and cast Parameters to the requested dtype, which transformers omits for some. Return the model."""
    for place, module in model.named_modules():
        for own in [name for name, x in module._parameters.items() if x is None]:
            parts = {name: x.detach() for name, x in module._parameters.items() if x is not None and is_part(name, own)}
            weight: Any = unflatten_state_dict(parts).get(own)
            if not isinstance(weight, QuantizedWeight):
                continue
            for name in parts:
                del module._parameters[name]
            dtype = dtypes[f"{place}.{own}" if place else own]
            module._parameters[own] = nn.Parameter(weight.to(dtype), requires_grad=False)
    for name, x in model.named_parameters():
        if x.dtype != dtypes.get(name, x.dtype):
            x.data = x.data.to(dtypes[name])
    return model
