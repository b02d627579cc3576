"""Quantization of whole models, and their state as plain tensors for file formats such as safetensors."""

from __future__ import annotations

import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ..errors import InvalidProblemError
from ..problem.dtypes import dtype_name
from ..quantized.weight import QuantizedWeight
from .modules import check_model, is_conv1d, is_experts, is_linear

log = logging.getLogger("gemmtune")
Tensor = torch.Tensor
Bits = Literal["int4", "int8", "float8"]
M = TypeVar("M", bound=nn.Module)
_GROUPS = (32, 64, 128)
_KINDS = {"int4": "int4", "int8": "int8", "float8": "float8_e4m3fn"}
_SKIP = ("lm_head",)


def quantize_(
    model: M,
    kind: Bits = "int4",
    *,
    group: int = 128,
    skip: str | Collection[str] = _SKIP,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> M:
    """Quantize the weights of each ``nn.Linear``, each HF Conv1D and the experts of transformers, in place.

    Each weight becomes a ``QuantizedWeight``, a Parameter without a gradient. Inputs and biases keep theirs. Products of float
    inputs with it are ``mixed_mm``. With 8-bit floats each row of the input is rounded with its own scale, and the product is
    ``scaled_mm``. Grouped products with experts are ``mixed_grouped_mm`` or ``scaled_grouped_mm``.

    Layers that share a Parameter share the quantized one. Weights that already have this kind do not change. A layer is skipped
    with a warning if its Parameter also belongs to a module that keeps floats, such as an ``nn.Embedding``. Further warnings name
    entries of ``skip`` that match nothing, and a model without quantized weights. The log, at level INFO, has counts and sizes.

    Args:
        model: any module with finite weights of a float dtype.
        kind: ``int4`` has a scale for each ``group`` elements along K, ``int8`` and ``float8`` one for each output.
        group: 32, 64 or 128, for ``int4`` only. Experts use the largest of these up to ``group`` that divides K.
        skip: name or names of layers, or of Parameters of experts, that keep their floats. The end of a name is enough.
        filter_fn: called with each layer and its name, for experts with their module and the Parameter's name. Returns True to
            quantize it.

    Returns:
        The model.

    Raises:
        InvalidProblemError: not a module, an unknown kind or group, a weight that is already quantized in another kind, or one
            that cannot be quantized, named by its layer.
    """
    check_model("quantize_", model)
    check_kind(kind, group)
    weights = _weights_by_name(model)
    chosen = _chosen(model, weights, names_of(skip), filter_fn)
    todo = {whole: (module, name) for whole, (module, name) in chosen.items() if not _is_already(whole, module, name, kind)}
    if chosen:
        before, others = len(chosen) - len(todo), len(weights) - len(chosen)
        made = _replaced(todo, kind, group)
        log.info("quantize_: %s; %d weights were quantized before, %d keep their floats", made, before, others)
    return model


Weights = Mapping[str, tuple[nn.Module, str]]
"""Modules and the names of their Parameters, by the qualified name."""


def _chosen(model: nn.Module, weights: Weights, skip: Sequence[str], filter_fn: Callable[[nn.Module, str], bool] | None) -> Weights:
    """Return the weights that are neither skipped, filtered out nor tied to floats.

    Warn about ties, about names that skip nothing, and if no weight remains.
    """
    for word in skip:
        if word not in _SKIP and not any(_is_skipped(whole, (word,)) for whole in weights):
            example = next(iter(weights), "") or "fc1"
            _warn(f"skip: got {word!r}, which skips nothing; expected a layer's name or the end of one, such as {example!r}")
    chosen = {
        whole: (module, name)
        for whole, (module, name) in weights.items()
        if not _is_skipped(whole, skip) and (filter_fn is None or filter_fn(module, whole))
    }
    for whole, other in _ties(model, chosen).items():
        _warn(
            f"{whole} stays as it is: its weight is also {other}, which keeps its floats; give the layer a separate weight to "
            "quantize it, or name it in skip="
        )
        del chosen[whole]
    if not chosen:
        why = "each is skipped, filtered out or tied" if weights else "the model has none"
        _warn(f"nothing is quantized: of nn.Linear, Conv1D and the experts of transformers, {why}")
    return chosen


def _ties(model: nn.Module, chosen: Weights) -> dict[str, str]:
    """Return the chosen float weights that are also a Parameter of a module that is not chosen, with that Parameter's name."""
    own = set(chosen.values())
    others = {
        x: f"{place}.{name}".removeprefix(".")
        for place, module in model.named_modules()
        for name, x in module._parameters.items()
        if x is not None and (module, name) not in own and not isinstance(x, QuantizedWeight)
    }
    return {whole: others[x] for whole, (module, name) in chosen.items() if (x := module._parameters[name]) in others}


def _replaced(todo: Weights, kind: Bits, group: int) -> str:
    """Quantize the weights, and return their counts and sizes as text. Raise InvalidProblemError if one cannot be quantized."""
    before_bytes, after_bytes, made = 0, 0, dict[nn.Module, Tensor]()
    holders = defaultdict[int, list[str]](list)  # by identity: Parameters as keys would keep all floats until the end
    for whole, (module, name) in todo.items():
        holders[id(module._parameters[name])].append(whole)
    for whole, *others in holders.values():
        module, name = todo[whole]
        try:
            quantized = _quantized(module, name, kind, group)
        except InvalidProblemError as error:
            remedy = f"{whole}: {error}; name it in skip=" if whole else str(error)
            raise InvalidProblemError(f"quantize_: {remedy}") from error
        before_bytes, after_bytes = before_bytes + getattr(module, name).nbytes, after_bytes + quantized.nbytes
        weight = nn.Parameter(quantized, requires_grad=False)
        for module, name in (todo[holder] for holder in (whole, *others)):
            made[module] = weight
            setattr(module, name, weight)
    experts = [len(weight) for weight in made.values() if weight.dim() == 3]
    what = f"{len(made) - len(experts)} layers and {sum(experts)} experts are {kind} now"
    return f"{what}: {after_bytes / 1e6:.1f} MB instead of {before_bytes / 1e6:.1f}"


def dequantize_(model: M) -> M:
    """Give each quantized weight of a model its dequantized values as a Parameter without a gradient, in place. Return the model.

    Libraries that change weights, such as peft where it merges adapters, can change these. Shared Parameters stay shared.
    """
    check_model("dequantize_", model)
    made = dict[Tensor, nn.Parameter]()
    for module in model.modules():
        weights: dict[str, Any] = {name: x for name, x in module._parameters.items() if isinstance(x, QuantizedWeight)}
        for name, x in weights.items():
            if x not in made:
                made[x] = nn.Parameter(x.dequantize().contiguous(), requires_grad=False)
            module._parameters[name] = made[x]
    return model


def check_kind(kind: str, group: int) -> None:
    """Raise InvalidProblemError for a kind or group that ``quantize_`` lacks."""
    if kind not in _KINDS:
        raise InvalidProblemError(f"quantize_: kind: got {kind!r}, expected one of {', '.join(_KINDS)}")
    if group not in _GROUPS:
        raise InvalidProblemError(f"quantize_: group: got {group!r}, expected one of {', '.join(map(str, _GROUPS))}")


def names_of(skip: str | Collection[str]) -> list[str]:
    """Return ``skip`` as a list of names."""
    return [skip] if isinstance(skip, str) else list(skip)


def _warn(text: str) -> None:
    warnings.warn(f"quantize_: {text}", RuntimeWarning, stacklevel=4)


def _weights_by_name(model: nn.Module) -> Weights:
    """Return the weights that can be quantized or already are, by the name of the layer, for experts of the Parameter."""
    return {
        place if name == "weight" else f"{place}.{name}".removeprefix("."): (module, name)
        for place, module in model.named_modules()
        for name in _weights_of(module)
    }


def _weights_of(module: nn.Module) -> list[str]:
    """Return the names of a module's Parameters that can be quantized or already are."""
    if is_linear(module) or is_conv1d(module):
        names = ["weight"]
    elif is_experts(module):
        names = [name for name, x in module._parameters.items() if x is not None and x.dim() == 3]
    else:
        return []
    weights = {name: module._parameters.get(name) for name in names}
    return [name for name, x in weights.items() if x is not None and x.is_floating_point()]


def _is_already(whole: str, module: nn.Module, name: str, kind: Bits) -> bool:
    """Return True if the weight has this kind. Raise InvalidProblemError for another kind, whose float values are lost."""
    weight = getattr(module, name)
    if not isinstance(weight, QuantizedWeight):
        return False
    found = weight.encoding or dtype_name(weight.tensor.dtype)
    if found != _KINDS[kind]:
        raise InvalidProblemError(
            f"quantize_: kind: got {kind!r}, but {whole or 'the weight'} is already {found}, expected a weight of floats or of "
            f"{kind}; load the model again, or name it in skip="
        )
    return True


def _is_skipped(name: str, skip: Collection[str]) -> bool:
    return any(name == word or name.endswith(f".{word}") for word in skip)


def _quantized(module: nn.Module, name: str, kind: Bits, group: int) -> Tensor:
    """Return the quantized weight in the module's form: [N, K] in an ``nn.Linear`` and most experts, otherwise [K, N]."""
    transposed = is_linear(module) or getattr(module, "is_transposed", True) is False
    weight = module._parameters[name]
    assert weight is not None
    whole = weight.detach().mT if transposed else weight.detach()
    if whole.dim() == 3:  # all groups of experts have the same number of elements
        group = max((g for g in _GROUPS if g <= group and whole.shape[1] % g == 0), default=group)
    scales = f"group_{group}" if kind == "int4" else "column"
    found = QuantizedWeight.quantize(whole, _KINDS[kind], scales=scales)  # type: ignore[arg-type]
    return found.mT if transposed else found


def flatten_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a ``state_dict`` of plain tensors, for example for safetensors. Each ``QuantizedWeight`` becomes its parts.

    The weight ``fc.weight`` becomes its numbers ``fc.weight_int4_as_bfloat16_t``, ``fc.weight_scales`` and
    ``fc.weight_zero_points``. ``unflatten_state_dict`` is the inverse.
    """
    plain: dict[str, Tensor] = {}
    for name, x in state.items():
        if isinstance(x, QuantizedWeight):
            plain |= {f"{name}_{part}": tensor for part, tensor in flat_parts(x).items()}
        else:
            plain[name] = x
    return plain


def flat_parts(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the parts of a weight as contiguous tensors. The names state their dtypes."""
    kind = weight.encoding or dtype_name(weight.tensor.dtype)
    transposed = weight.transposed
    parts = {f"{kind}_as_{dtype_name(weight.dtype)}{'_t' * transposed}": weight.tensor.mT if transposed else weight.tensor}
    parts |= {name: x for name in ("scales", "zero_points") if (x := getattr(weight, name)) is not None}
    return {name: x.detach().contiguous() for name, x in parts.items()}


_NUMBERS = re.compile(r"(.+)_(u?int[48]|float8_e4m3fn|float8_e5m2)_as_(float64|float32|float16|bfloat16)(_t)?")
"""The name of a weight's numbers: the weight, their encoding, the weight's dtype, and ``_t`` if the weight is transposed."""


def is_part(name: str, weight: str) -> bool:
    """Return True if ``name`` is a part of the weight ``weight``, as ``flatten_state_dict`` names it."""
    found = _NUMBERS.fullmatch(name)
    return found[1] == weight if found else name in (f"{weight}_scales", f"{weight}_zero_points")


def unflatten_state_dict(plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the ``state_dict`` from the plain tensors of ``flatten_state_dict``."""
    found = {match.string: match for match in map(_NUMBERS.fullmatch, plain) if match}
    parts = {f"{match[1]}_{part}" for match in found.values() for part in ("scales", "zero_points")}
    state: dict[str, Tensor] = {}
    for name, x in plain.items():
        if name in found:
            base = found[name][1]
            state[base] = _put_together(found[name], x, plain.get(f"{base}_scales"), plain.get(f"{base}_zero_points"))
        elif name not in parts:
            state[name] = x
    return state


def _put_together(match: re.Match[str], numbers: Tensor, scales: Tensor | None, zero_points: Tensor | None) -> Tensor:
    """Return the QuantizedWeight from its parts. ``match`` is the name of the numbers."""
    _, kind, dtype, transposed = match.groups()
    encoding: Literal["", "int4", "uint4"] = kind if kind in ("int4", "uint4") else ""  # type: ignore[assignment]
    weight = QuantizedWeight(numbers.mT if transposed else numbers, scales, zero_points, encoding, dtype=getattr(torch, dtype))
    return weight.mT if transposed else weight
