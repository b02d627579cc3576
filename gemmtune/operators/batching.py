"""Operators under ``torch.vmap``: a batch of products as one product where there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .schema import OPERATORS, Operator

Tensor = torch.Tensor
_SHARED_BY_ROWS = ("a", "b", "scale_b", "zero_b")
"""Arguments that have nothing of their own for each row of a: where a alone has a batch, its rows may be put below each other."""


def batched(operator: Operator) -> Callable[..., tuple[Tensor, int]]:
    """The rule for ``register_vmap``.

    A batch of left operands alone has its rows put below each other. A batch of dense products is a batched product. Products of
    narrow numbers and of groups, for which there is no batched operation, follow one another.
    """
    row = operator.row

    def rule(info: Any, in_dims: Sequence[int | None], *tensors: Tensor | None, **words: Any) -> tuple[Tensor, int]:
        given = operator.given(tensors)
        batches = {name: d for name, d in zip(operator.tensors, in_dims, strict=False) if d is not None}
        first = {name: x.movedim(batches[name], 0) if name in batches else x for name, x in given.items()}
        if [*batches] == ["a"] and not row.batched and all(name in _SHARED_BY_ROWS for name in given):
            rows = {**first, "a": first["a"].flatten(0, 1)}
            return operator.overload(*map(rows.get, operator.tensors), **words).unflatten(0, first["a"].shape[:2]), 0
        if row.quantized or row.grouped:
            slices = ({name: x[i] if name in batches else x for name, x in first.items()} for i in range(info.batch_size))
            return torch.stack([operator.overload(*map(one.get, operator.tensors), **words) for one in slices]), 0
        whole = {name: x if name in batches else x.expand(info.batch_size, *x.shape) for name, x in first.items()}
        if row.second:
            whole["inp"] = as_batch({"a": whole["c"], "b": whole["d"]}, {})
        return as_batch(whole, words), 0

    return rule


def as_batch(x: Mapping[str, Tensor], words: Mapping[str, Any]) -> Tensor:
    """a @ b, with an added operand if there is one, for a batch in front; a batch behind that becomes part of it."""
    a, b, inp = x["a"], x["b"], x.get("inp")
    tensors = [a, b]
    if inp is not None:
        ones = [1] * (a.dim() - inp.dim())
        tensors.insert(0, inp.reshape(inp.shape[0], *ones, *inp.shape[1:]).expand(*a.shape[:-1], b.shape[-1]))
    name = "bmm" if inp is None else "baddbmm"
    result: Tensor = OPERATORS[name].overload(*(t.flatten(0, -3) for t in tensors), **words)
    return result.view(*a.shape[:-1], b.shape[-1])
