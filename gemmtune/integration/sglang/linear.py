"""Linear layers of SGLang whose weight is not quantized. ``serving.products`` has the products."""

from collections.abc import Iterator
from typing import Any

import torch

from ..serving.products import OP, operation_for, product
from ..serving.tables import invariant
from .points import DENSE, Points

Tensor = torch.Tensor
Hook = tuple[str, Any]
"""Target of a hook, and the function that gets the original one first."""
PLAIN = (Tensor, torch.nn.Parameter)
"""Types of a weight. Others, such as torchao's, have products of their own."""


def hooks(points: Points) -> Iterator[Hook]:
    """Yield hooks that run layers by our tables, and all others as before."""

    def loaded(original: Any, method: Any, layer: Any) -> None:
        op = _operation(layer, points)
        setattr(layer, OP, op)
        if not op or points.device_type != "cpu":  # on a CPU SGLang would pack the weight
            original(method, layer)

    def apply(original: Any, method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        op = getattr(layer, OP, "")
        if op and type(layer.weight) in PLAIN and (op == "invariant" or not points.is_invariant()):
            return product(op, x, layer.weight, bias)
        return original(method, layer, x, bias)  # type: ignore[no-any-return]

    yield f"{DENSE}.process_weights_after_loading", loaded
    yield f"{DENSE}.apply", apply


def _operation(layer: Any, points: Points) -> str:
    """Return the operation by whose table we run a layer, or an empty text if SGLang runs it."""
    weight: Any = getattr(layer, "weight", None)
    if type(weight) not in PLAIN or weight.device.type != points.device_type or (invariant(points) and not points.bounded):
        return ""
    return operation_for(layer, points)
