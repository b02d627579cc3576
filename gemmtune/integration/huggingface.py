"""``from_pretrained(..., quantization_config=...)`` of transformers. Imported by who uses it, since it imports transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..dispatch.weights import QuantizedWeight
from .quantize import Bits, check_kind, flat_parts, flatten_state_dict, quantize_, unflatten_state_dict

METHOD = "gemmtune"


@register_quantization_config(METHOD)
class GemmtuneConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """``AutoModel.from_pretrained(name, quantization_config=GemmtuneConfig("int4"))``: ``quantize_`` on what was loaded.

    The arguments are those of ``quantize_``. ``save_pretrained`` saves the quantized weights, and ``from_pretrained`` loads them.
    """

    def __init__(self, kind: Bits = "int4", group: int = 128, skip: Any = ("lm_head",), **_: Any) -> None:
        check_kind(kind, group)
        self.quant_method = METHOD
        self.kind, self.group, self.skip = kind, group, list(skip)


@register_quantizer(METHOD)
class GemmtuneQuantizer(HfQuantizer):  # type: ignore[misc]
    """What transformers asks while it loads and saves a model with a ``GemmtuneConfig``."""

    requires_calibration = False
    is_compileable = True
    is_trainable = False

    def is_serializable(self, **_: Any) -> bool:
        """Weights are saved as plain tensors."""
        return True

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        return _taken_apart(self._quantized(model)) if self.pre_quantized else model

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        return _put_together(model) if self.pre_quantized else self._quantized(model)

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What is saved."""
        return flatten_state_dict(model.state_dict()), {}

    def _quantized(self, model: nn.Module) -> nn.Module:
        config = self.quantization_config
        return quantize_(model, config.kind, group=config.group, skip=config.skip)


def _taken_apart(model: nn.Module) -> nn.Module:
    """The model with Parameters for the parts of its weights, which transformers loads as any others."""
    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        if isinstance(weight, QuantizedWeight):
            module._parameters["weight"] = None
            for name, x in flat_parts(weight).items():
                module.register_parameter(f"weight_{name}", nn.Parameter(x, requires_grad=False))
    return model


def _put_together(model: nn.Module) -> nn.Module:
    """Undo ``_taken_apart``."""
    for module in model.modules():
        parts = {name: x.detach() for name, x in module._parameters.items() if name.startswith("weight_") and x is not None}
        if parts and module._parameters.get("weight", 0) is None:
            for name in parts:
                del module._parameters[name]
            module._parameters["weight"] = nn.Parameter(unflatten_state_dict(parts)["weight"], requires_grad=False)
    return model
