"""Products of SGLang whose weights and inputs have 8 bits: float8 with scales of rows and columns, and int8.

SGLang rounds the inputs and calls a function for the product, around which our hook stands. It serves shapes for which a layer
with a table was loaded, and reads the weight that it is given.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ..serving.scaled import float8_product, int8_product
from ..serving.tables import invariant, unserved_unmeasured
from .linear import Hook
from .points import PRODUCTS, Points

Tensor = torch.Tensor
SERVED: dict[tuple[torch.dtype, int, int, torch.dtype], bool] = {}
"""True for each weight that has a table, by its dtype, N and K and the dtype of the result."""


def hooks(points: Points) -> Iterator[Hook]:
    """Yield hooks that run products of the weights in SERVED."""

    def scaled(
        original: Any, mat_a: Tensor, mat_b: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: Any, bias: Any = None
    ) -> Tensor:
        (k, n), m = mat_b.shape, mat_a.shape[0]
        by_rows = mat_a.dim() == 2 and scales_a.numel() == m and scales_b.numel() == n
        if not SERVED.get((mat_b.dtype, n, k, out_dtype), False) or not by_rows or points.is_invariant():
            return original(mat_a, mat_b, scales_a, scales_b, out_dtype, bias)  # type: ignore[no-any-return]
        product = int8_product if mat_b.dtype == torch.int8 else float8_product
        return product(mat_a, mat_b, scales_a.reshape(-1, 1), scales_b.reshape(1, -1), bias, out_dtype)

    yield from ((target, scaled) for target in PRODUCTS if target in points.targets)


def note(layer: Any, points: Points) -> None:
    """Note in SERVED if a table has the product of a loaded layer, whose weight [K, N] has a scale for each column."""
    weight, scale, dtype = (getattr(layer, name, None) for name in ("weight", "weight_scale", "params_dtype"))
    if not isinstance(weight, Tensor) or not isinstance(scale, Tensor) or not isinstance(dtype, torch.dtype):
        return
    known = weight.dtype in (torch.int8, torch.float8_e4m3fn) and scale.dtype == torch.float32 and weight.dim() == 2
    if not known or weight.device.type != points.device_type or invariant(points):
        return
    k, n = weight.shape
    if scale.numel() == n and weight.stride(0) == 1:
        op, words = "int_mm", {}
        if weight.dtype != torch.int8:
            op, words = "scaled_mm", {"dtype": weight.dtype, "out_dtype": dtype, "scales": "row"}
        SERVED[weight.dtype, n, k, dtype] = not unserved_unmeasured(op, (n, k), words, points)
