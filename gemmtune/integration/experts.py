"""Forwards of experts of transformers: by stored picks, or by batch-invariant tables. This module does not import transformers."""

import sys
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..errors import InvalidProblemError
from ..operand_kinds import Gate
from ..ops.grouped import grouped_mm
from ..ops.operate import is_batch_invariant
from ..problem.grouped_compositions import added_alike, added_by_token, within_groups
from .invariant import invariant_grouped, product_of_layer

_GATES: dict[str, Gate] = {
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
}
"""Gates of kernels, by the class of a module's activation."""
_STEPS = frozenset({"has_gate", "has_bias", "has_post_expert_norm"})
"""Attributes of experts that name a step of their forward, as far as the forwards of this module know them."""
LISTS_NOTHING = torch.__version__ < "2.12"
"""True if graphs of this torch cannot list the attributes of a module."""


def is_experts(module: nn.Module) -> bool:
    """Return True for experts of transformers: their weights are Parameters [G, N, K], or with ``is_transposed`` [G, K, N]."""
    return isinstance(getattr(module, "num_experts", None), int) and isinstance(getattr(module, "is_transposed", None), bool)


def has_matrices(module: nn.Module) -> bool:
    """Return True for experts whose matrices have the names that the forwards of this module read."""
    return is_experts(module) and all(hasattr(module, name) for name in ("has_gate", "has_bias", "down_proj", _first_name(module)))


def routers_of(model: nn.Module) -> set[nn.Module]:
    """Return the modules that multiply by a row for each expert, next to experts with matrices, and are no linear layers."""
    found = set[nn.Module]()
    for parent in model.modules():
        counts = {module.num_experts for module in parent.children() if has_matrices(module)}
        for module in parent.children() if counts else ():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 2 and weight.shape[0] in counts and not isinstance(module, nn.Linear):
                found.add(module)
    return found


def experts_by_picks(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the result of experts by stored picks, else torch, or by batch-invariant tables, as the settings say."""
    if is_batch_invariant():
        return invariant_experts(module, x, index, weights)
    name, gated = _first_name(module), _gate_of(module)
    experts, slots, offs = _by_expert(module, index)
    matrix = _matrix_of(module, name)
    h = grouped_mm(x.to(matrix.dtype), matrix, offs, rows=slots // index.shape[-1], gated=gated)
    if not gated:
        h = _activated(module, _with_bias(module, name, h, experts, offs))
    weights, matrix = weights.reshape(index.shape).to(h.dtype), _matrix_of(module, "down_proj")
    if module.has_bias or _has_norm(module):
        product = _finished(module, grouped_mm(h, matrix, offs), experts, offs)
        return added_by_token(product, offs, slots, weights).to(x.dtype)
    return grouped_mm(h, matrix, offs, scatter=(slots, weights)).to(x.dtype)


def invariant_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the forward of experts so that the bits of a token do not depend on the others.

    Both products run by the batch-invariant tables of the weights. What an activation gives to a token is torch's. Rows of a token
    are added up in the order of its experts.
    """
    x, name, copies = hidden_states, _first_name(module), top_k_index.shape[-1]
    experts, slots, offs = _by_expert(module, top_k_index)
    matrix = _matrix_of(module, name)
    rows = x.to(matrix.dtype).index_select(0, slots // copies)
    h = _with_bias(module, name, invariant_grouped(rows, matrix, offs, copies), experts, offs)
    h = invariant_grouped(_activated(module, h), _matrix_of(module, "down_proj"), offs, copies)
    product = _finished(module, h, experts, offs)
    return added_alike(product, offs, slots, top_k_weights.reshape(top_k_index.shape)).to(x.dtype)


def invariant_router(module: nn.Module, *args: Any, **words: Any) -> Any:
    """Run the forward of a router whose product has the bits of a batch-invariant table."""
    with _Products():
        return type(module).forward(module, *args, **words)


class _Products(TorchFunctionMode):
    """Mode in which ``torch.nn.functional.linear`` runs by batch-invariant tables."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            return product_of_layer(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _first_name(module: Any) -> str:
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def by_expert(index: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the expert and the slot of each row in the order of ``count`` experts, and where the rows of each expert end.

    Row t · C + c of the experts is slot c of token t. Indices from ``count`` on come last, in no group.
    """
    experts, slots = index.flatten().sort()
    numbers = torch.arange(count, device=experts.device, dtype=experts.dtype)
    return experts, slots, torch.searchsorted(experts, numbers, right=True, out_int32=True)


def _by_expert(module: Any, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the expert and the slot of each row in the order of experts, and where the rows of each expert end.

    Raises InvalidProblemError for experts of a later transformers with a step that we would leave out.
    """
    names = _flags_of(type(module)) if LISTS_NOTHING and is_compiling() else vars(module)
    flags = (name for name in names if name.startswith("has_") and name not in _STEPS)
    if unknown := sorted(name for name in flags if getattr(module, name, False) is True):
        raise InvalidProblemError(
            f"{type(module).__name__}: got experts with {', '.join(unknown)}, expected only {', '.join(sorted(_STEPS))}; "
            'set experts_implementation="grouped_mm"'
        )
    return by_expert(index, module.num_experts)


def _flags_of(kind: type) -> tuple[str, ...]:
    """Return the names that the constructors of a class use, which set the attributes of its objects."""
    constructors = (vars(base).get("__init__") for base in kind.__mro__)
    return tuple(name for x in constructors if isinstance(x, FunctionType) for name in x.__code__.co_names)


_flags_of._dynamo_marked_constant = True  # type: ignore[attr-defined] # as in ``operate``


def _activated(module: Any, x: Tensor) -> Tensor:
    result: Tensor = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    return result


def _matrix_of(module: Any, name: str) -> Tensor:
    """Return the matrices of all experts [G, K, N]."""
    weight: Tensor = getattr(module, name)
    return weight if module.is_transposed else weight.mT


def _gate_of(module: Any) -> Gate:
    """Return the gate that a kernel applies, "" if the module has to: for biases, another activation or a gate of its own."""
    by_halves = getattr(sys.modules.get("transformers.integrations.moe"), "_default_apply_gate", None)
    if not module.has_gate or module.has_bias or by_halves is None or type(module)._apply_gate is not by_halves:
        return ""
    kind = type(module.act_fn)
    return _GATES.get(f"{kind.__module__}.{kind.__qualname__}", "")


def _has_norm(module: Any) -> bool:
    """Return True for experts that normalize the rows of their last product. transformers has such from version 5.24 on."""
    return getattr(module, "has_post_expert_norm", False) is True


def _finished(module: Any, product: Tensor, experts: Tensor, offs: Tensor) -> Tensor:
    """Return the last product with the bias of each row's expert, and normalized where the experts are."""
    product = _with_bias(module, "down_proj", product, experts, offs)
    if not _has_norm(module):
        return product
    result: Tensor = module.post_expert_norm(within_groups(product, offs))
    return result


def _with_bias(module: Any, name: str, product: Tensor, experts: Tensor, offs: Tensor) -> Tensor:
    """Return the product with the bias of each row's expert. Rows of no expert become 0, and add nothing to the bias's gradient."""
    if not module.has_bias:
        return product
    bias: Tensor = getattr(module, f"{name}_bias")
    return within_groups(product + bias[experts.clamp(max=module.num_experts - 1)], offs)
