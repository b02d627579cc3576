"""torch's grouped products of 8-bit floats, older and newer operator, in the words of our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

aten = torch.ops.aten
TARGETS = frozenset(
    operator.default
    for name in ("_scaled_grouped_mm", "_scaled_grouped_mm_v2")
    if (operator := getattr(aten, name, None)) is not None  # torch has the newer one from 2.10 on
)
ROWS = 1
"""``torch.nn.functional.ScalingType.RowWise``."""
SCALES = ("scale_a", "scale_b")


def named(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by the names of its schema, without those that are left out or say nothing."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return {name: value for name, value in given.items() if value is not None and value is not False and value != []}


def stated(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | str:
    """The operands of ``scaled_grouped_mm`` by role and its numbers, or why torch alone has the product.

    torch has scales as vectors: [M] and [G, N], which are [M, 1] and [G, 1, N] here.
    """
    recipes = [kind for name in ("recipe_a", "recipe_b") for kind in given.get(name, [ROWS])]
    ours = {"self", "mat2", *SCALES, "offs", "out_dtype", "use_fast_accum", "recipe_a", "recipe_b"}
    if given.keys() - ours or "offs" not in given or set(recipes) != {ROWS}:
        return "torch alone has its bias, its other scales and its other forms"
    operands = {"a": given["self"], "b": given["mat2"], "offs": given["offs"]}
    for name in SCALES:
        [operands[name]] = given[name] if isinstance(given[name], (list, tuple)) else [given[name]]
    return operands, {"fast_accum": bool(given.get("use_fast_accum", False)), "out_dtype": given.get("out_dtype", torch.bfloat16)}
