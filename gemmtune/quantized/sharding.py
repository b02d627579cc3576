"""Rules for torch.distributed: a QuantizedWeight's parts are sharded and gathered, or refused, and never become floats."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..problem.scales import SCALE_BLOCK
from .asker import FULLY_SHARD, asker, refuse
from .collectives import Flat
from .pieces import N, axis_of, join, joined, padded, piece, split, unit_of, zeros
from .views import HasNoMemory, untraced

Tensor = torch.Tensor
aten = torch.ops.aten
QuantizedWeight = Any
"""The class: its module is above this one."""


def sharded(cls: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do a function for torch.distributed. Raise InvalidProblemError for one that would need floats."""
    rule = _RULES.get(func)
    result = None if rule is None else rule(*args, **kwargs)
    return next(refuse(func, x) for x in tree_leaves((args, kwargs)) if isinstance(x, cls)) if result is None else result


def _split(w: QuantizedWeight, size: int, dim: int = 0) -> list[QuantizedWeight] | None:
    length = w.shape[dim]
    return _split_into(w, [min(size, length - start) for start in range(0, length, size)], dim)


def _split_into(w: QuantizedWeight, sizes: Sequence[int], dim: int = 0) -> list[QuantizedWeight] | None:
    equal_rows = dim % w.dim() == 0 and len(set(sizes)) == 1
    return split(w, dim, sizes) if equal_rows or not asker().startswith(FULLY_SHARD) else None


def _sliced(
    w: QuantizedWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedWeight | None:
    first, last, step = slice(start, end, step).indices(w.shape[dim])
    return piece(w, dim, first, max(first, last)) if step == 1 else None


def _zeros(w: QuantizedWeight, size: Sequence[int], *, dtype: Any = None, **_: Any) -> QuantizedWeight | None:
    return zeros(w, size) if len(size) == w.dim() and dtype in (None, w.dtype) else None


def _empty(w: QuantizedWeight, *, dtype: Any = None, device: Any = None, **_: Any) -> QuantizedWeight | None:
    return w.map_parts(lambda part: torch.empty_like(part, device=device)) if dtype in (None, w.dtype) else None


def _padded(w: QuantizedWeight, pad: Sequence[int], value: float = 0) -> QuantizedWeight | None:
    """Return the weight with zeros behind it along one dimension."""
    behind = {w.dim() - 1 - i // 2: count for i, count in enumerate(pad) if count}
    if len(behind) != 1 or any(pad[::2]) or value or min(pad) < 0:
        return None
    [(dim, count)] = behind.items()
    return padded(w, dim, count)


def _cat(weights: Sequence[Any], dim: int = 0) -> QuantizedWeight | None:
    kinds = [(x.encoding, x.transposed, x.dtype, x.dim(), len(x.parts)) if hasattr(x, "map_parts") else None for x in weights]
    return joined(weights, dim) if None not in kinds and len(set(kinds)) == 1 else None


def _viewed(w: QuantizedWeight, size: Sequence[int]) -> Any:
    if tuple(size) == w.shape:
        return w.map_parts(lambda part: part.detach())
    return Flat([w]) if list(size) in ([-1], [w.numel()]) else None


_RULES: dict[Any, Callable[..., Any]] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_into,
    aten.slice.Tensor: _sliced,
    aten.new_zeros.default: _zeros,
    aten.empty_like.default: _empty,
    aten.constant_pad_nd.default: _padded,
    aten.cat.default: _cat,
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
}


class GatheredByFsdp(HasNoMemory):
    """A tensor with the two methods that ``fully_shard`` looks for in a shard."""

    @untraced
    def fsdp_pre_all_gather(
        self, _mesh: Any, _outer_size: Any, _outer_stride: Any, _module: Any, _policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return the parts to gather, contiguous, with the weight's rows or experts first, and no metadata."""
        w: QuantizedWeight = self
        rows = [_rows_first(w, part, part).contiguous() for part in w.parts if not _is_shared(w, part)]
        return tuple(x.view(torch.uint8) if x.itemsize == 1 else x for x in rows), None  # gloo does not know 8-bit floats

    @untraced
    def fsdp_post_all_gather(
        self, gathered: Sequence[Tensor], _metadata: None, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[QuantizedWeight, tuple[Tensor, ...]] | None:
        """Return the whole weight, made of gathered tensors, and its parts with memory of their own. ``out`` gets such parts."""
        w: QuantizedWeight = self
        rest: list[Tensor] = []
        if len(gathered) < sum(not _is_shared(w, part) for part in w.parts):  # in a group of one process torch gathers one tensor
            shard, _ = self.fsdp_pre_all_gather(None, None, None, None, None)
            rest += [x.to(gathered[0].device) for x in shard[len(gathered) :]]
        outputs, own = iter((*gathered, *rest)), list[Tensor]()

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
