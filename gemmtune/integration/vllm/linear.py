"""Linear layers of vLLM whose weight is not quantized. ``serving.products`` has the products."""

from typing import Any

import torch
from torch.nn import functional

from ..serving.products import OP, operation_for, product
from .notes import note
from .points import Points

Tensor = torch.Tensor
_OURS = "gemmtune_original"
"""Attribute of a function that stands in a linear method of vLLM, with vLLM's own."""


def take_over(method: Any, points: Points) -> None:
    """Let a linear method run layers by our tables, and all others as before. A second call changes nothing."""
    if hasattr(method.apply, _OURS):
        return
    process, apply = method.process_weights_after_loading, method.apply

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        op = "" if getattr(layer, "_cpu_skip_gemm_dispatch", False) else operation_for(layer, points)
        if op and not note(points, f"{op} {list(layer.weight.shape)} {layer.weight.dtype}"):
            op = ""
        setattr(layer, OP, op)
        if op and points.device_type == "cpu":
            layer.cpu_linear = functional.linear  # vLLM would pack the weight and drop it
        else:
            process(self, layer)

    def apply_weights(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        op = getattr(layer, OP, "")
        if op:
            return product(op, x, layer.weight, bias)
        return apply(self, layer, x, bias)  # type: ignore[no-any-return]

    for name, ours, theirs in (
        ("process_weights_after_loading", process_weights_after_loading, process),
        ("apply", apply_weights, apply),
    ):
        setattr(ours, _OURS, theirs)
        setattr(method, name, ours)
