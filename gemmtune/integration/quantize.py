"""Quantization of whole models, and their state as plain tensors for file formats such as safetensors."""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from ..errors import InvalidProblemError
from ..foreign import shown
from ..problem.dtypes import dtype_name
from ..quantized.rounding import check_plain
from ..quantized.weight import QuantizedWeight
from ..warning import warn
from .dequantize import dequantize_
from .experts import is_experts
from .flat_state import flatten_state_dict, unflatten_state_dict
from .forwards import is_offloaded
from .modules import check_model, is_conv1d, is_linear
from .replaced import replacing

__all__ = ["dequantize_", "flatten_state_dict", "quantize_", "unflatten_state_dict"]

log = logging.getLogger("gemmtune")
Bits = Literal["int4", "int8", "float8"]
M = TypeVar("M", bound=nn.Module)
_GROUPS = (32, 64, 128)
_KINDS = {"int4": "int4", "int8": "int8", "float8": "float8_e4m3fn"}
_SKIP = ("lm_head",)
_ROUTER = re.compile("(.*_)?router|gate|gating|.*expert_gate")


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
    with a warning if its Parameter also belongs to a module that keeps floats, such as an ``nn.Embedding``, or if its shape has
    no such kind. Further warnings name entries of ``skip`` that match nothing, and a model without quantized weights. The log, at
    level INFO, has counts and sizes.

    Routers of mixtures of experts keep their floats. If a weight fails, or the call is interrupted, all weights do. So the floats
    stay in memory until the end.

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
            with infinity or NaN, named by its layer.
    """
    return quantized(model, kind, group, names_of(skip), filter_fn)


def quantized(
    model: M,
    kind: Bits,
    group: int,
    skip: Sequence[str],
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    all_or_none: bool = True,
) -> M:
    """Do what ``quantize_`` does. Without ``all_or_none`` the floats of a weight are freed at once, and a failure leaves some."""
    check_model("quantize_", model)
    check_kind(kind, group)
    weights = weights_by_name(model)
    chosen = _chosen(model, weights, kind, skip, filter_fn)
    todo = {whole: (module, name) for whole, (module, name) in chosen.items() if not _is_already(whole, module, name, kind)}
    if chosen:
        before, others = len(chosen) - len(todo), len(weights) - len(chosen)
        made = _replaced(todo, kind, group, all_or_none)
        log.info("quantize_: %s; %d weights were quantized before, %d keep their floats", made, before, others)
    return model


Weights = dict[str, tuple[nn.Module, str]]
"""Modules and the names of their Parameters, by the qualified name."""


def _chosen(
    model: nn.Module, weights: Weights, kind: Bits, skip: Sequence[str], filter_fn: Callable[[nn.Module, str], bool] | None
) -> Weights:
    """Return the weights that are neither skipped, filtered out, a router's, tied to floats nor of a shape without this kind.

    Warn about ties and shapes, about names that skip nothing, and if no weight remains.
    """
    for word in skip:
        if word not in _SKIP and not any(is_skipped(whole, (word,)) for whole in weights):
            example = next(iter(weights), "") or "fc1"
            _warn(f"skip: got {word!r}, which skips nothing; expected a layer's name or the end of one, such as {example!r}")
    routers = _routers(model)
    chosen = {
        whole: (module, name)
        for whole, (module, name) in weights.items()
        if module not in routers and not is_skipped(whole, skip) and (filter_fn is None or filter_fn(module, whole))
    }
    for whole, other in _ties(model, chosen).items():
        _warn(
            f"{whole} stays as it is: its weight is also {other}, which keeps its floats; give the layer a separate weight to "
            "quantize it, or name it in skip="
        )
        del chosen[whole]
    for reason, (first, *others) in _unfit(chosen, kind).items():
        more = f" and {len(others)} more stay as they are" if others else " stays as it is"
        _warn(f"{first or 'the weight'}{more}: {reason}; name it in skip=")
        for whole in (first, *others):
            del chosen[whole]
    if not chosen:
        why = "each is skipped, filtered out, tied, a router or of another shape" if weights else "the model has none"
        _warn(f"nothing is quantized: of nn.Linear, Conv1D and the experts of transformers, {why}")
    return chosen


def _unfit(chosen: Weights, kind: Bits) -> dict[str, list[str]]:
    """Return the names of weights that have no such kind, by the reason: their layout or their shape."""
    unfit = defaultdict[str, list[str]](list)
    for whole, (module, name) in chosen.items():
        weight = getattr(module, name)
        if isinstance(weight, nn.UninitializedParameter):
            unfit["got a weight of a lazy layer, whose size the first call sets; call the model before"].append(whole)
        elif is_offloaded(module, weight):
            unfit["got a weight that accelerate has offloaded, expected one in memory; quantize the model before"].append(whole)
        elif weight.layout is not torch.strided:
            unfit[f"got a weight of {weight.layout}, expected a dense one"].append(whole)
        elif not weight.numel():
            unfit[f"got a weight {list(weight.shape)}, expected one with elements"].append(whole)
        elif kind == "int4" and (inputs := _inputs(module, weight)) % (even := 2 if weight.dim() == 2 else _GROUPS[0]):
            unfit[f"got {inputs} inputs in a weight {list(weight.shape)}, expected a multiple of {even} for int4"].append(whole)
    return unfit


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


def _replaced(todo: Weights, kind: Bits, group: int, all_or_none: bool) -> str:
    """Quantize the weights, and return their counts and sizes as text. Raise InvalidProblemError if one cannot be quantized."""
    before_bytes, after_bytes, made = 0, 0, dict[nn.Module, Tensor]()
    holders = defaultdict[int, list[str]](list)  # by identity: Parameters as keys would keep all floats until the end
    for whole, (module, name) in todo.items():
        holders[id(module._parameters[name])].append(whole)
    with replacing(undo=all_or_none) as replace:
        for whole, *others in holders.values():
            before_bytes += getattr(*todo[whole]).nbytes
            try:
                few = _quantized(*todo[whole], kind, group)
            except InvalidProblemError as error:
                remedy = f"{whole}: {error}; name it in skip=" if whole else str(error)
                raise InvalidProblemError(f"quantize_: {remedy}") from error
            after_bytes += few.nbytes
            weight = nn.Parameter(few, requires_grad=False)
            for module, name in (todo[holder] for holder in (whole, *others)):
                made[module] = weight
                replace(module, name, weight)
    experts = [len(weight) for weight in made.values() if weight.dim() == 3]
    what = f"{len(made) - len(experts)} layers and {sum(experts)} experts are {kind} now"
    return f"{what}: {after_bytes / 1e6:.1f} MB instead of {before_bytes / 1e6:.1f}"


def check_kind(kind: str, group: int) -> None:
    """Raise InvalidProblemError for a kind or group that ``quantize_`` lacks."""
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidProblemError(f"quantize_: kind: got {shown(kind)}, expected one of {', '.join(_KINDS)}")
    if type(group) is not int or group not in _GROUPS:
        raise InvalidProblemError(f"quantize_: group: got {shown(group)}, expected one of {', '.join(map(str, _GROUPS))}")


def names_of(skip: str | Collection[str]) -> list[str]:
    """Return ``skip`` as a list of names. Raises InvalidProblemError for other values, which a checkpoint may have."""
    names = [skip] if isinstance(skip, str) else list(skip) if isinstance(skip, Collection) else [skip]
    for name in names:
        if not isinstance(name, str):
            raise InvalidProblemError(f"quantize_: skip: got {shown(name)}, expected the name of a layer, or several")
    return names


def _warn(text: str) -> None:
    warn(f"quantize_: {text}")


def weights_by_name(model: nn.Module) -> Weights:
    """Return the weights that can be quantized or already are, by the name of the layer, for experts of the Parameter."""
    return {
        place if name == "weight" else f"{place}.{name}".removeprefix("."): (module, name)
        for place, module in model.named_modules()
        for name in _weights_of(module)
    }


def _routers(model: nn.Module) -> set[nn.Module]:
    """Return the modules that choose experts, by their names next to experts. A rounded choice costs more than it saves."""
    found = set[nn.Module]()
    for module in model.modules():
        children = dict(module.named_children())
        if any("experts" in name or "Experts" in type(child).__name__ for name, child in children.items()):
            found.update(x for name, child in children.items() if _ROUTER.fullmatch(name) for x in child.modules())
    return found


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


def is_skipped(name: str, skip: Collection[str]) -> bool:
    """Return True if the name, or the end of it, is in ``skip``."""
    return any(name == word or name.endswith(f".{word}") for word in skip)


def _inputs(module: nn.Module, weight: Tensor) -> int:
    """Return K of a weight, without a view of it: a class of another library may have none."""
    return weight.shape[-1 if _is_transposed(module) else -2]


def _matrix(module: nn.Module, name: str) -> Tensor:
    """Return the weight as [K, N], or [G, K, N] of experts. An ``nn.Linear`` and most experts have [N, K]."""
    weight = module._parameters[name]
    assert weight is not None
    check_plain(weight)
    return weight.detach().mT if _is_transposed(module) else weight.detach()


def _is_transposed(module: nn.Module) -> bool:
    return is_linear(module) or getattr(module, "is_transposed", True) is False


def _quantized(module: nn.Module, name: str, kind: Bits, group: int) -> Tensor:
    """Return the quantized weight in the module's form."""
    whole = _matrix(module, name)
    if whole.dim() == 3:  # all groups of experts have the same number of elements
        group = max((g for g in _GROUPS if g <= group and whole.shape[1] % g == 0), default=group)
    scales = f"group_{group}" if kind == "int4" else "column"
    found = QuantizedWeight.quantize(whole, _KINDS[kind], scales=scales)  # type: ignore[arg-type]
    return found.mT if _is_transposed(module) else found
