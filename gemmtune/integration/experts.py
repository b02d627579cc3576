"""Forward of transformers' experts by grouped products. ``huggingface`` imports this module, because it imports transformers."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
from transformers.integrations import moe

from .. import settings
from ..operand_kinds import Gate
from ..ops.grouped import grouped_mm
from ..problem.grouped_compositions import added_by_token, within_groups

_GATES: dict[type[nn.Module], Gate] = {nn.SiLU: "silu", SiLUActivation: "silu", GELUActivation: "gelu", GELUTanh: "gelu_tanh"}
"""Gates of kernels, by the class of a module's activation."""
_GATED_BY_HALVES = getattr(moe, "_default_apply_gate", None)
"""The method of modules that gate by act(first half of the columns) · second half."""


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
        return _by_picks(module, hidden_states, top_k_index, top_k_weights)


def _by_picks(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    name, gated = "gate_up_proj" if module.has_gate else "up_proj", _gate_of(module)
    experts, slots = top_k_index.flatten().sort()
    numbers = torch.arange(module.num_experts, device=experts.device, dtype=experts.dtype)
    offs = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    matrix = _matrix_of(module, name)
    x = grouped_mm(hidden_states.to(matrix.dtype), matrix, offs, rows=slots // top_k_index.shape[-1], gated=gated)
    if not gated:
        x = _with_bias(module, name, x, experts, offs)
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    weights, matrix = top_k_weights.reshape(top_k_index.shape).to(x.dtype), _matrix_of(module, "down_proj")
    if module.has_bias:
        product = _with_bias(module, "down_proj", grouped_mm(x, matrix, offs), experts, offs)
        return added_by_token(product, offs, slots, weights).to(hidden_states.dtype)
    return grouped_mm(x, matrix, offs, scatter=(slots, weights)).to(hidden_states.dtype)


def _matrix_of(module: Any, name: str) -> Tensor:
    """Return the matrices of all experts [G, K, N]."""
    weight: Tensor = getattr(module, name)
    return weight if module.is_transposed else weight.mT


def _gate_of(module: Any) -> Gate:
    """Return the gate that a kernel applies, "" if the module has to: for biases, another activation or a gate of its own."""
    if not module.has_gate or module.has_bias or type(module)._apply_gate is not _GATED_BY_HALVES:
        return ""
    return _GATES.get(type(module.act_fn), "")


def _with_bias(module: Any, name: str, product: Tensor, experts: Tensor, offs: Tensor) -> Tensor:
    """Return the product with the bias of each row's expert. Rows of no expert become 0, and add nothing to the bias's gradient."""
    if not module.has_bias:
        return product
    bias: Tensor = getattr(module, f"{name}_bias")
    return within_groups(product + bias[experts.clamp(max=module.num_experts - 1)], offs)
