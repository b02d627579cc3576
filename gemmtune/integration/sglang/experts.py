"""Layers of experts of SGLang that are not quantized. SGLang routes the tokens and exchanges them between devices."""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ...problem.grouped_compositions import gated_columns
from ..serving.experts import Sizes, dense_layer, summed, why_not
from .linear import PLAIN, Hook
from .points import EXPERTS, Points

Tensor = torch.Tensor
SERVED = "gemmtune_experts"
"""Attribute of a layer, True if we run it."""
_PLAIN_OPTIONS = {
    "activation": ("silu",), "is_gated": (True,), "routed_scaling_factor": (None, 1.0), "gemm1_alpha": (None,),
    "gemm1_beta": (None,), "gemm1_clamp_limit": (None,), "swiglu_limit": (None,), "no_combine": (False,),
    "apply_router_weight_on_input": (False,),
}  # fmt: skip
"""Values of a layer's options with which it is Σ weights · down(silu(gate(x)) · up(x))."""


def hooks(points: Points) -> Iterator[Hook]:
    """Yield hooks that run layers by the tables of ``grouped_mm``, and all others as before."""

    if (combined := points.combined) is None:
        return

    def loaded(original: Any, method: Any, layer: Any) -> None:
        setattr(layer, SERVED, _is_served(method, layer, points))
        if not getattr(layer, SERVED) or points.device_type != "cpu":  # on a CPU SGLang would pack the weights
            original(method, layer)
        if getattr(method, "w13_swiglu_interleaved", False):  # SGLang mixed the columns of gates with the others
            setattr(layer, SERVED, False)

    def apply(original: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
        ours = getattr(layer, SERVED, False) and type(layer.w13_weight) in PLAIN and not points.is_invariant()
        if not ours or not _is_standard(dispatch_output):
            return original(method, layer, dispatch_output)
        return combined(hidden_states=_product(layer, dispatch_output))

    yield f"{EXPERTS}.process_weights_after_loading", loaded
    yield f"{EXPERTS}.apply", apply


def _is_served(method: Any, layer: Any, points: Points) -> bool:
    """Return True if tables serve a layer that SGLang would run by Triton, with weights [G, N, K], gates first."""
    weights: list[Any] = [getattr(layer, name, None) for name in ("w13_weight", "w2_weight")]
    config: Any = getattr(layer, "moe_runner_config", None)
    runner: Any = getattr(method, "runner", None)
    if any(type(w) not in PLAIN or w.dim() != 3 or w.device.type != points.device_type for w in weights):
        return False
    if runner is None or not runner.runner_backend.is_triton() or getattr(method, "_aiter_runner", None) is not None:
        return False
    if any(getattr(config, name, None) not in values for name, values in _PLAIN_OPTIONS.items()):
        return False
    first, last = weights
    sizes = Sizes(
        experts=first.shape[0], hidden=first.shape[2], inner=last.shape[2], halves=first.shape[1] // last.shape[2],
        copies=config.top_k,
    )  # fmt: skip
    return not why_not("grouped_mm", sizes, {"dtype": first.dtype}, points)


def _is_standard(dispatch_output: Any) -> bool:
    """Return True for rows of tokens, not quantized, with the numbers and weights of their experts."""
    formats = (getattr(x, "format", None) for x in (dispatch_output, dispatch_output.topk_output))
    return all(getattr(x, "name", "") == "STANDARD" for x in formats) and dispatch_output.hidden_states_scale is None


def _product(layer: Any, dispatch_output: Any) -> Tensor:
    x, (weights, ids, *_) = dispatch_output.hidden_states, dispatch_output.topk_output
    first, last = layer.w13_weight, layer.w2_weight
    count, biases = first.shape[0], (getattr(layer, "w13_weight_bias", None), getattr(layer, "w2_weight_bias", None))
    experts = dense_layer(x, first, last, functools.partial(gated_columns, gated="silu"), biases)
    here = torch.where(ids < 0, count, ids)  # negative numbers are of experts elsewhere
    return summed(here, weights, count, experts, all_here=False)
