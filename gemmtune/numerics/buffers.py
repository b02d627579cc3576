"""Buffers of exactly a layout, in which a write outside of it shows."""

from __future__ import annotations

import math

import torch

from ..problem import Layout

GUARD_BYTES = 256
"""The room between the start of the buffer and the operand, and at least as much behind it; a multiple of every alignment of
interest."""

_BITS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

POISONS: dict[torch.dtype, tuple[int, int]] = {
    torch.float16: (0x7E5A, 0x7EA5),
    torch.bfloat16: (0x7FDA, 0x7FE5),
    torch.float32: (0x7FC5A5A5, 0x7FDA5A5A),
    torch.float64: (0x7FF85A5A5A5A5A5A, 0x7FFDA5A5A5A5A5A5),
    torch.int32: (0x5A5A5A5B, 0x6B5A5A5B),
}
"""Two bit patterns for each dtype of a result: an element that holds one was not written. For floats they are quiet NaNs with
payloads that no arithmetic makes; for int32, which has no NaN, odd numbers larger than sums of int8 products below K = 2^16."""

_BYTE_NAN: dict[torch.dtype, int] = {
    torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7E, torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80,
}  # fmt: skip
"""The ordinary NaN as bits, since not every torch fills 8-bit floats with numbers."""


def allocate(layout: Layout, device: torch.device, *, guard_bytes: int = GUARD_BYTES) -> torch.Tensor:
    """A tensor with exactly this size, stride and offset (``data_ptr() % 16 == offset · itemsize % 16``), not initialised.

    It lies in a buffer of its own (``storage_bits`` shows all of it) with guard bands of ``guard_bytes`` on both sides. Strides may
    be 0 and elements may overlap.
    """
    itemsize = layout.dtype.itemsize
    guard = -(-guard_bytes // GUARD_BYTES) * GUARD_BYTES // itemsize
    words = -(-(guard + layout.offset + layout.span + guard) * itemsize // 8)  # whole 8-byte words: checksums read those
    buffer = torch.empty(words, dtype=torch.int64, device=device).view(layout.dtype)
    return buffer.as_strided(layout.size, layout.stride, guard + layout.offset)


def storage_bits(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The whole buffer behind ``tensor`` with guard bands and padding, as integers as wide as its elements (or of ``dtype``)."""
    dtype = dtype or _BITS[tensor.element_size()]
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


def poison(tensor: torch.Tensor, payload: int) -> None:
    """Fill the whole buffer behind ``tensor`` with the bit pattern ``payload`` (see POISONS)."""
    storage_bits(tensor).fill_(payload)


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements hold one of the bit patterns of POISONS."""
    bits, (first, second) = tensor.view(_BITS[tensor.element_size()]), POISONS[tensor.dtype]
    return (bits == first) | (bits == second)


def fill_nan(tensor: torch.Tensor) -> None:
    """Fill the whole buffer behind ``tensor`` with the ordinary NaN, which can be told from POISONS; of integers the one furthest
    from 0."""
    if tensor.dtype in _BYTE_NAN:
        storage_bits(tensor).fill_(_BYTE_NAN[tensor.dtype])
    elif not tensor.dtype.is_floating_point:
        bounds = torch.iinfo(tensor.dtype)
        storage_bits(tensor, tensor.dtype).fill_(bounds.min or bounds.max)
    else:
        storage_bits(tensor, tensor.dtype).fill_(math.nan)


def guard_mask(tensor: torch.Tensor) -> torch.Tensor | None:
    """True for every element of the buffer behind ``tensor`` that is not its own; None if only the two bands around it are not."""
    if tensor.numel() == Layout.of(tensor).span:
        return None
    mask = torch.ones_like(storage_bits(tensor), dtype=torch.bool)
    distinct(mask.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())).fill_(False)
    return mask


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from the first to the last element of ``tensor`` as one dimension, padding between them included."""
    return tensor.as_strided((Layout.of(tensor).span,), (1,))


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with one element along every dimension of stride 0: a view that can be written."""
    return tensor.as_strided(distinct_size(Layout.of(tensor)), tensor.stride())


def distinct_size(layout: Layout) -> tuple[int, ...]:
    """The layout's size with 1 for every dimension of stride 0."""
    return tuple(1 if s == 0 and n > 1 else n for n, s in zip(layout.size, layout.stride, strict=True))


def held_size(layout: Layout) -> tuple[int, ...]:
    """What values the layout can hold: ``distinct_size``, or its memory as one dimension where elements overlap."""
    return (layout.span,) if overlapping(layout) else distinct_size(layout)


def placed(layout: Layout, device: torch.device, values: torch.Tensor | None) -> torch.Tensor:
    """A buffer of that layout, NaN throughout except for ``values``, as many as ``held_size`` says; None leaves all NaN."""
    tensor = allocate(layout, device)
    fill_nan(tensor)
    if values is not None:
        target = flat(tensor) if overlapping(layout) else distinct(tensor)
        target.copy_(values.reshape(target.shape))
    return tensor


def overlapping(layout: Layout) -> bool:
    """Whether elements share memory other than by a stride of 0, so that they cannot be chosen independently.

    Conservative: the rare interleaved layouts that do not overlap although one dimension reaches past the stride of another
    count as overlapping.
    """
    reach = 1
    for stride, size in sorted((s, n) for n, s in zip(layout.size, layout.stride, strict=True) if n > 1 and s > 0):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False
