"""Whole models with weights of few bits, and their state as plain tensors, for files that know no others."""

from __future__ import annotations

import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, TypeVar

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
    """Make the weight of each ``nn.Linear``, each HF Conv1D, and the experts of transformers, a ``QuantizedWeight``, in place.

    Products of float inputs with it are then ``mixed_mm``; those with 8-bit floats round each row of the input with a scale of its
    own and are ``scaled_mm``; grouped products with experts are ``mixed_grouped_mm`` or ``scaled_grouped_mm``. The weights are
    Parameters without a gradient; inputs and biases have theirs. A line of the log, at level INFO, says how many were made and what
    they take; weights that are of that kind already stay. Layers that share a Parameter share one afterwards. A layer stays
    as it is where something has that Parameter too that keeps its floats, such as an ``nn.Embedding`` or a layer that is skipped.
    Warns of such layers, of names that skip nothing, and where nothing is quantized.

    Args:
        model: any module; its weights are of a float dtype, and finite.
        kind: ``int4`` has a scale for each ``group`` elements along K, ``int8`` and ``float8`` one for each output.
        group: 32, 64 or 128; of ``int4`` alone. Experts have the largest of these up to ``group`` that divides K.
        skip: names of layers, or of Parameters of experts, whole or their end, that stay as they are; one name may stand alone.
        filter_fn: called with a layer and its name, for experts with their module and the Parameter's name: whether to quantize it.

    Returns:
        The model.

    Raises:
        InvalidProblemError: not a module, another kind or group, a weight that is of another kind of few bits already, or one that
            cannot be quantized, named by its layer.
    """
    check_model("quantize_", model)
    check_kind(kind, group)
    weights = {
        place if name == "weight" else f"{place}.{name}".removeprefix("."): (module, name)
        for place, module in model.named_modules()
        for name in _weights_of(module)
    }
    chosen = _chosen(model, weights, names_of(skip), filter_fn)
    todo = {whole: (module, name) for whole, (module, name) in chosen.items() if not _is_already(whole, module, name, kind)}
    if chosen:
        so_before, others = len(chosen) - len(todo), len(weights) - len(chosen)
        told = _replaced(todo, kind, group)
        log.info("quantize_: %s; %d weights were so before, %d stay as they are", told, so_before, others)
    return model


Weights = Mapping[str, tuple[nn.Module, str]]
"""Modules and the names of their Parameters, by the whole name."""


def _chosen(model: nn.Module, weights: Weights, skip: Sequence[str], filter_fn: Callable[[nn.Module, str], bool] | None) -> Weights:
    """The weights that are neither skipped, filtered out nor tied to floats.

    Warns of ties, of names that skip nothing, and if there is none.
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
            f"{whole} stays as it is: its weight is {other} too, which keeps its floats; give the layer a weight of its own to "
            "quantize it, or name it in skip="
        )
        del chosen[whole]
    if not chosen:
        why = "each is skipped, filtered out or tied" if weights else "the model has none"
        _warn(f"nothing is quantized: of nn.Linear, Conv1D and the experts of transformers, {why}")
    return chosen


def _ties(model: nn.Module, chosen: Weights) -> dict[str, str]:
    """Weights of floats that are a Parameter of something else, too, that is not chosen: what that is called."""
    own = set(chosen.values())
    others = {
        x: f"{place}.{name}".removeprefix(".")
        for place, module in model.named_modules()
        for name, x in module._parameters.items()
        if x is not None and (module, name) not in own and not isinstance(x, QuantizedWeight)
    }
    return {whole: others[x] for whole, (module, name) in chosen.items() if (x := module._parameters[name]) in others}


def _replaced(todo: Weights, kind: Bits, group: int) -> str:
    """Quantize the weights; what there is of them now. Raises InvalidProblemError for one that cannot be quantized."""
    before_bytes, after_bytes, made = 0, 0, dict[nn.Module, Tensor]()
    holders = defaultdict[int, list[str]](list)  # by identities: Parameters as keys would keep all floats until the end
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


def check_kind(kind: str, group: int) -> None:
    """Raises InvalidProblemError for a kind or group that ``quantize_`` does not have."""
    if kind not in _KINDS:
        raise InvalidProblemError(f"quantize_: kind: got {kind!r}, expected one of {', '.join(_KINDS)}")
    if group not in _GROUPS:
        raise InvalidProblemError(f"quantize_: group: got {group!r}, expected one of {', '.join(map(str, _GROUPS))}")


def names_of(skip: str | Collection[str]) -> list[str]:
    """The names that ``skip`` has."""
    return [skip] if isinstance(skip, str) else list(skip)


def _warn(text: str) -> None:
    warnings.warn(f"quantize_: {text}", RuntimeWarning, stacklevel=4)


def _weights_of(module: nn.Module) -> list[str]:
    """The Parameters of a module that are weights which can be quantized, or are."""
    if is_linear(module) or is_conv1d(module):
        names = ["weight"]
    elif is_experts(module):
        names = [name for name, x in module._parameters.items() if x is not None and x.dim() == 3]
    else:
        return []
    weights = {name: module._parameters.get(name) for name in names}
    return [name for name, x in weights.items() if x is not None and x.is_floating_point()]


def _is_already(whole: str, module: nn.Module, name: str, kind: Bits) -> bool:
    """The weight is of that kind. Raises InvalidProblemError where it is of another one: its float values are gone."""
    weight = getattr(module, name)
    if not isinstance(weight, QuantizedWeight):
        return False
    found = weight.encoding or dtype_name(weight.tensor.dtype)
    if found != _KINDS[kind]:
        raise InvalidProblemError(
            f"quantize_: kind: got {kind!r}, but {whole or 'the weight'} is {found} already, expected a weight of floats or of "
            f"{kind}; load the model anew, or name it in skip="
        )
    return True


def _is_skipped(name: str, skip: Collection[str]) -> bool:
    return any(name == word or name.endswith(f".{word}") for word in skip)


def _quantized(module: nn.Module, name: str, kind: Bits, group: int) -> Tensor:
    """The weight of that name, as the module has it: [N, K] in an ``nn.Linear`` and most experts, else [K, N]."""
    turned = is_linear(module) or getattr(module, "is_transposed", True) is False
    weight = module._parameters[name]
    assert weight is not None
    whole = weight.detach().mT if turned else weight.detach()
    if whole.dim() == 3:  # groups of experts have all as many elements
        group = max((g for g in _GROUPS if g <= group and whole.shape[1] % g == 0), default=group)
    scales = f"group_{group}" if kind == "int4" else "column"
    found = QuantizedWeight.quantize(whole, _KINDS[kind], scales=scales)  # type: ignore[arg-type]
    return found.mT if turned else found


def flatten_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A ``state_dict`` of plain tensors, such as safetensors saves: each ``QuantizedWeight`` becomes its parts.

    The weight ``fc.weight`` is ``fc.weight_int4_as_bfloat16_t``, its numbers, with ``fc.weight_scales`` and
    ``fc.weight_zero_points``. ``unflatten_state_dict`` undoes it.
    """
    plain: dict[str, Tensor] = {}
    for name, x in state.items():
        if isinstance(x, QuantizedWeight):
            plain |= {f"{name}_{part}": tensor for part, tensor in flat_parts(x).items()}
        else:
            plain[name] = x
    return plain


def flat_parts(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The parts of a weight as contiguous tensors, by names that say what they are."""
    kind = weight.encoding or dtype_name(weight.tensor.dtype)
    turned = weight.transposed
    parts = {f"{kind}_as_{dtype_name(weight.dtype)}{'_t' * turned}": weight.tensor.mT if turned else weight.tensor}
    parts |= {name: x for name in ("scales", "zero_points") if (x := getattr(weight, name)) is not None}
    return {name: x.detach().contiguous() for name, x in parts.items()}


_NUMBERS = re.compile(r"(.+)_(u?int[48]|float8_e4m3fn|float8_e5m2)_as_(float64|float32|float16|bfloat16)(_t)?")


def is_part(name: str, weight: str) -> bool:
    """It is the name of one of the parts of the weight of that name, as ``flatten_state_dict`` makes it."""
    found = _NUMBERS.fullmatch(name)
    return found[1] == weight if found else name in (f"{weight}_scales", f"{weight}_zero_points")


def unflatten_state_dict(plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The ``state_dict`` of which ``flatten_state_dict`` made plain tensors."""
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
    _, kind, dtype, turned = match.groups()
    encoding: Literal["", "int4", "uint4"] = kind if kind in ("int4", "uint4") else ""  # type: ignore[assignment]
    weight = QuantizedWeight(numbers.mT if turned else numbers, scales, zero_points, encoding, dtype=getattr(torch, dtype))
    return weight.mT if turned else weight
