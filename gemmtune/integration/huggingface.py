"""Entries of transformers: ``quantization_config=GemmtuneConfig(...)`` and ``experts_implementation="gemmtune"``.

Users import this module, because it imports transformers.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
)
from transformers.integrations import moe
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .. import settings
from ..errors import InvalidProblemError
from .experts import experts_by_picks
from .flat_state import PARTS, flatten_state_dict, unflatten_state_dict
from .quantize import Bits, check_kind, is_skipped, names_of, quantized, weights_by_name

METHOD = "gemmtune"
_PATTERNS = {rf"\.([^.]+)_{part}$": part for part in PARTS}
"""Parts of a weight, by the pattern of their names in a file. Its group is the name of the weight."""
_ANY_PART = re.compile(f"(.+)_({'|'.join(PARTS)})")
_BYTES = {"int4": 0.5, "int8": 1.0, "float8": 1.0}


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


class Assembly(ConversionOps):  # type: ignore[misc]
    """Conversion of the parts in a file to the weight of a module, by transformers while it loads.

    Until then the module has its float weight on the meta device, which models read when they initialize what the file lacks.
    """

    def convert(
        self, input_dict: Mapping[str, list[Tensor]], *, full_layer_name: str, model: nn.Module, **_: Any
    ) -> dict[str, nn.Parameter]:
        """Return the weight by its name. Raises InvalidProblemError if a part is missing or the weight has another shape."""
        parts = {_PATTERNS[pattern]: tensors[0] for pattern, tensors in input_dict.items()}
        weight = unflatten_state_dict({f"weight_{part}": x for part, x in parts.items()}).get("weight")
        if weight is None or "scales" not in parts:
            raise InvalidProblemError(
                f"{full_layer_name}: got only {', '.join(parts)} in the file, expected numbers and scales; save the model again"
            )
        expected = model.get_parameter(full_layer_name).shape
        if weight.shape != expected:
            raise InvalidProblemError(
                f"{full_layer_name}: got {list(weight.shape)} in the file, expected {list(expected)}; load the model with the "
                "configuration that it was saved with, and without tp_plan"
            )
        return {full_layer_name: nn.Parameter(weight, requires_grad=False)}


class PartRenaming(WeightRenaming):  # type: ignore[misc]
    """Renamings of a model, in which each part gets the name that its weight would get.

    Some renamings fit names that they should leave. transformers undoes them where the name in the file is that of a weight in
    the model, which a part is not.
    """

    __slots__ = ("names", "others", "prefix")

    def __init__(self, others: list[WeightRenaming], prefix: str, names: Collection[str]) -> None:
        super().__init__("^$", "")
        self.others, self.prefix, self.names = others, prefix, dict.fromkeys(names, True)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the name in the model for a name in the file, and None for the pattern."""
        found = _ANY_PART.fullmatch(source_key)
        name = found[1] if found else source_key
        renamed = rename_source_key(name, self.others, [], self.prefix, self.names)[0]
        if found and renamed not in self.names:
            renamed = rename_source_key(name, [], [], self.prefix, self.names)[0]
        return f"{renamed}_{found[2]}" if found else renamed, None


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

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:  # noqa: ARG002
        """Return the conversions from tensors in the file to those of the model.

        A quantized model is saved in the shapes of its modules, so that of the model's own conversions only renamings apply.
        transformers gives the model from version 5.24 on.
        """
        if not self.pre_quantized:
            return weight_conversions
        weights = WeightConverter(list(_PATTERNS), r".\1", [Assembly()])
        return [weights, PartRenaming(_renamings(weight_conversions), self._prefix, self._dtypes)]

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:  # noqa: ARG002
        """Return None for a part of a weight, which keeps the dtype in the file. transformers asks from version 5.24 on."""
        assembled = any(isinstance(operation, Assembly) for operation in getattr(converter, "operations", ()))
        return None if assembled else dtype

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:  # noqa: ARG002
        """Return the bytes of one element in the file. transformers plans the devices of modules by them."""
        return _BYTES[self.quantization_config.kind] if param_name in self._few else param.element_size()

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        self._dtypes, self._prefix, self._few = _dtypes(model), str(model.base_model_prefix), set[str]()
        if self.pre_quantized:
            weights, skip = weights_by_name(model), self.quantization_config.skip
            self._few = {
                f"{whole}.weight" if own == "weight" else whole
                for whole, (_, own) in weights.items()
                if not is_skipped(whole, skip)
            }
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        model._weight_conversions = _renamings(getattr(model, "_weight_conversions", None) or [])  # type: ignore[assignment]
        if not self.pre_quantized:
            config = self.quantization_config
            return quantized(model, config.kind, config.group, config.skip, all_or_none=False)
        # transformers omits the requested dtype for tensors with another name in the file.
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            if x.dtype != (dtype := self._dtypes.get(name, x.dtype)):
                x.data = x.data.to(dtype)
        return model

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the saved tensors by name, and no metadata."""
        return flatten_state_dict(model.state_dict()), {}


def _renamings(conversions: list[Any]) -> list[Any]:
    """Return the conversions of a model that change names only, without those such as of a matrix for each expert to experts."""
    each = [y for x in conversions for y in (filter(WeightRenaming.was_used, x.others) if isinstance(x, PartRenaming) else [x])]
    return [x for x in each if not isinstance(x, WeightConverter)]


def _dtypes(model: Any) -> dict[str, torch.dtype]:
    """Return the dtypes that transformers gives to tensors of the model, some of which it keeps in float32."""
    plan = model._get_dtype_plan(model.dtype)
    kept, globs, _ = build_glob_alternation(list(plan)) if plan else (None, {}, {})
    found = {name: x.dtype for name, x in model.state_dict().items() if x.is_floating_point()}
    for name in found:
        if kept is not None and (match := kept.search(name)):
            found[name] = plan[globs[match.lastgroup]]
    return found


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return Σ_c weights[t, c] · expert index[t, c] of row t, for each row t.

    Stored picks run, else torch: a call tunes nothing. In graphs of torch.compile, transformers' own grouped products stand, which
    the pass of ``optimize`` replaces.

    Args:
        module: experts of transformers, with Parameters [G, N, K], or [G, K, N] where ``is_transposed``.
        hidden_states: [T, K].
        top_k_index, top_k_weights: [T, C]. Indices from ``num_experts`` on, as expert parallelism has them, count for nothing.

    Returns:
        [T, N] of the input's dtype.
    """
    if torch.compiler.is_compiling():
        result: Tensor = moe.grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return result
    with settings.use(settings.given().never_tuning):
        return experts_by_picks(module, hidden_states, top_k_index, top_k_weights)


moe.ALL_EXPERTS_FUNCTIONS.register(METHOD, experts_forward)
