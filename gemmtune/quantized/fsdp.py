"""Gathering of a QuantizedWeight's parts by ``torch.distributed.fsdp.fully_shard``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..problem.scales import SCALE_BLOCK
from .pieces import N, axis_of, join, unit_of
from .views import HasNoMemory, untraced

Tensor = torch.Tensor
QuantizedWeight = Any
"""The class: its module is above this one."""


class GatheredByFsdp(HasNoMemory):
    """A tensor with the two methods that ``fully_shard`` looks for in a shard."""

    @untraced
    def fsdp_pre_all_gather(
        self, _mesh: Any, _outer_size: Any, _outer_stride: Any, _module: Any, _policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return the tensors to gather, and no metadata."""
        return tuple(gathered_parts(self)), None

    @untraced
    def fsdp_post_all_gather(
        self, gathered: Sequence[Tensor], _metadata: None, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[QuantizedWeight, tuple[Tensor, ...]] | None:
        """Return the whole weight, made of gathered tensors, and its parts with memory of their own. ``out`` gets such parts."""
        return whole_weight(self, gathered, dtype, out)


def gathered_parts(w: QuantizedWeight) -> list[Tensor]:
    """Return the parts to gather, contiguous, with the weight's rows or experts as the first dimension."""
    rows = [_rows_first(w, part, part).contiguous() for part in w.parts if not _is_shared(w, part)]
    return [x.view(torch.uint8) if x.itemsize == 1 else x for x in rows]  # gloo does not know 8-bit floats


def whole_weight(
    w: QuantizedWeight, gathered: Sequence[Tensor], dtype: torch.dtype, out: Any
) -> tuple[QuantizedWeight, tuple[Tensor, ...]] | None:
    """Return the weight of all shards, made of gathered parts, and the parts with memory of their own. ``out`` gets such parts."""
    outputs, own = iter(gathered), list[Tensor]()

    def whole(part: Tensor) -> Tensor:
        if _is_shared(w, part):
            return part
        rows = next(outputs).view(part.dtype)
        if unit_of(w, part, axis_of(w, 0)) is None:  # each shard has one block, or all have the same scales
            count = len(rows) // len(_rows_first(w, part, part))
            rows = join([None] * count, rows.chunk(count), 0)  # type: ignore[assignment]
        result = _rows_first(w, part, rows)
        if part is w.tensor or result.is_contiguous():
            return result
        own.append(result.contiguous())
        return own[-1]

    made = w.map_parts(whole, dtype)
    made.packed = None
    if out is None:
        return made, tuple(own)
    for part, target in zip(made.parts, getattr(out, "_local_tensor", out).parts, strict=True):
        if part.data_ptr() != target.data_ptr():
            target.copy_(part)
    return None


def _is_shared(w: QuantizedWeight, part: Tensor) -> bool:
    """Return True if all shards surely have the same part: a scale of the whole weight."""
    axis = axis_of(w, 0)
    return part.dim() < 2 or (axis == N and w.shape[0] > SCALE_BLOCK and unit_of(w, part, axis) is None)


def _rows_first(w: QuantizedWeight, part: Tensor, x: Tensor) -> Tensor:
    """Return x, a tensor like a part, with the first dimension of the weight as its first dimension. Doing it twice undoes it."""
    return x.mT if w.transposed and (part.dim() == 2 or part is w.tensor) else x
