"""Pieces of a QuantizedWeight along one of its dimensions: cut out, made of zeros, joined. Their parts stay quantized."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from ..problem.scales import GROUPS, block_of, scale_shapes
from .parts import size_of

Tensor = torch.Tensor
QuantizedWeight = Any
"""The class: its module is above this one."""
EXPERTS, K, N = -3, -2, -1
"""Axes of the parts."""


def axis_of(w: QuantizedWeight, dim: int) -> int:
    """Return the axis of the parts that a dimension of the weight is."""
    from_end: int = dim % w.dim() - w.dim()
    return from_end if from_end == EXPERTS or not w.transposed else K + N - from_end


def unit_of(w: QuantizedWeight, part: Tensor, axis: int) -> int | None:
    """Return how many elements of the weight along an axis one element of a part serves. None if it serves all of them."""
    if part is w.tensor:
        return 2 if w.encoding and axis == K else 1
    if axis == EXPERTS:
        return 1
    size = size_of(w.tensor, w.encoding)
    if w.dim() == 3:
        return 1 if axis == N else None if part.shape[1] == 1 else size[0] // part.shape[1]
    fits = (block for block, shape in zip(w.blocks, scale_shapes(size, w.blocks), strict=True) if tuple(part.shape) == shape)
    unit: int | None = next(fits, (None, None))[axis]
    return unit


def piece(w: QuantizedWeight, dim: int, start: int, stop: int) -> QuantizedWeight | None:
    """Return elements ``start`` to ``stop`` along a dimension, as views of the parts. None if that cuts a byte or a group."""
    axis, length = axis_of(w, dim), w.shape[dim]
    units = [unit_of(w, part, axis) or 1 for part in w.parts]
    if any(start % unit or (stop % unit and stop != length) for unit in units):
        return None

    def cut(part: Tensor) -> Tensor:
        unit = unit_of(w, part, axis)
        return part if unit is None else part.narrow(axis, start // unit, -(-stop // unit) - start // unit)

    return w.map_parts(cut)


def split(w: QuantizedWeight, dim: int, sizes: Sequence[int]) -> list[QuantizedWeight] | None:
    """Return consecutive pieces of these sizes. Groups that a boundary cuts become smaller groups with equal scales."""
    stops = list(accumulate(sizes))
    whole = _regrouped(w, stops[:-1]) if axis_of(w, dim) == K else w
    pieces = [piece(whole, dim, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    return None if any(x is None for x in pieces) else pieces


def zeros(w: QuantizedWeight, size: Sequence[int]) -> QuantizedWeight:
    """Return a weight of the same kind and another size, whose parts are zeros."""
    axes = {axis_of(w, dim): new for dim, (new, old) in enumerate(zip(size, w.shape, strict=True)) if new != old}

    def filled(part: Tensor) -> Tensor:
        shape = list(part.shape)
        for axis, new in axes.items():
            unit = unit_of(w, part, axis)
            if unit is not None:
                shape[axis] = -(-new // unit)
        column_major = part is w.tensor and part.stride(-1) != 1
        return part.new_zeros((*shape[:-2], shape[-1], shape[-2])).mT if column_major else part.new_zeros(shape)

    return w.map_parts(filled)


def padded(w: QuantizedWeight, dim: int, count: int) -> QuantizedWeight:
    """Return the weight with ``count`` more elements along a dimension, whose numbers are zeros."""
    axis, length = axis_of(w, dim), w.shape[dim] + count

    def longer(part: Tensor) -> Tensor:
        unit = unit_of(w, part, axis)
        if unit is None:
            return part
        shape = list(part.shape)
        shape[axis] = -(-length // unit) - shape[axis]
        return _next_to([part, part.new_zeros(shape)], axis)

    return w.map_parts(longer)


def joined(weights: Sequence[QuantizedWeight], dim: int) -> QuantizedWeight | None:
    """Return weights of one kind next to each other along a dimension. None if a boundary cuts a byte or a group."""
    first, axis = weights[0], axis_of(weights[0], dim)
    parts = [
        join([unit_of(w, x, axis) for w, x in zip(weights, alike, strict=True)], alike, axis)
        for alike in zip(*(w.parts for w in weights), strict=True)
    ]
    if any(part is None for part in parts):
        return None
    results = iter(parts)
    whole = first.map_parts(lambda _: next(results))
    size, scales = size_of(whole.tensor, whole.encoding), whole.parts[1:]
    if whole.dim() == 2 and any(block_of(tuple(part.shape), size, whole.blocks) is None for part in scales):
        return None
    stops = list(accumulate(w.shape[dim] for w in weights[:-1]))
    return None if any(stop % (unit_of(whole, part, axis) or 1) for part in whole.parts for stop in stops) else whole


def join(units: Sequence[int | None], parts: Sequence[Tensor], axis: int) -> Tensor | None:
    """Return parts next to each other, or the first if each serves a whole piece and all are equal. None for unequal scalars."""
    if all(unit is None for unit in units) and all(x.is_meta or torch.equal(x, parts[0]) for x in parts):
        return parts[0]
    return None if parts[0].dim() < 2 else _next_to(parts, axis)


def _next_to(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Return parts next to each other, column-major if the first one is, which torch.cat never makes."""
    if parts[0].stride(-1) == 1:
        return torch.cat(list(parts), axis)
    return torch.cat([x.mT for x in parts], axis if axis == EXPERTS else K + N - axis).mT


def _regrouped(w: QuantizedWeight, stops: Sequence[int]) -> QuantizedWeight:
    """Return the weight with groups along K that no boundary cuts, if there are any."""
    units = [unit for part in w.parts[1:] if (unit := unit_of(w, part, K)) is not None]
    columns = all(w.dim() == 3 or unit_of(w, part, N) in (1, None) for part in w.parts[1:])
    fits = [g for g in GROUPS if all(x % g == 0 for x in (*units, *stops))]
    if not columns or not fits or all(stop % unit == 0 for stop in stops for unit in units):
        return w
    k = size_of(w.tensor, w.encoding)[0]

    def repeated(part: Tensor) -> Tensor:
        unit = unit_of(w, part, K)
        if part is w.tensor or unit is None:
            return part
        return part.repeat_interleave(unit // max(fits), K).narrow(K, 0, -(-k // max(fits)))

    return w.map_parts(repeated)
