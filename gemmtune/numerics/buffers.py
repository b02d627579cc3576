"""Buffers with exactly the strides of a layout, made so that writes outside of it show."""

import math

import torch

from ..problem import Layout

GUARD_BYTES = 256
"""Minimum room on either side of the operand in its buffer, a multiple of every relevant alignment."""

_BITS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

POISONS: dict[torch.dtype, tuple[int, int]] = {
    torch.float16: (0x7E5A, 0x7EA5), torch.bfloat16: (0x7FDA, 0x7FE5), torch.float32: (0x7FC5A5A5, 0x7FDA5A5A),
    torch.float64: (0x7FF85A5A5A5A5A5A, 0x7FFDA5A5A5A5A5A5), torch.int32: (0x5A5A5A5B, 0x6B5A5A5B),
}  # fmt: skip
"""Two bit patterns per dtype for unwritten results: odd NaNs of floats, and of int32 odd numbers beyond sums below K = 2^16."""

_BYTE_NAN: dict[torch.dtype, int] = {
    torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7E, torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80,
}  # fmt: skip
"""Bits of the ordinary NaN, because not every torch version fills 8-bit floats with numbers."""


def allocate(layout: Layout, device: torch.device, *, guard_bytes: int = GUARD_BYTES, room: int = 0) -> torch.Tensor:
    """Allocate an uninitialised tensor with exactly this size, stride and offset.

    ``data_ptr() % 16`` equals ``offset · itemsize % 16``. The tensor has a separate buffer with guard bands of
    ``guard_bytes`` on both sides, and ``storage_bits`` shows all of it. Strides may be 0 and elements may overlap. ``room``
    elements follow the tensor.
    """
    itemsize = layout.dtype.itemsize
    guard = -(-guard_bytes // GUARD_BYTES) * GUARD_BYTES // itemsize
    words = -(
        -(guard + layout.offset + layout.span + room + guard) * itemsize // 8
    )  # whole 8-byte words, because checksums read those
    buffer = torch.empty(words, dtype=torch.int64, device=device).view(layout.dtype)
    return buffer.as_strided(layout.size, layout.stride, guard + layout.offset)


def storage_bits(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the whole buffer behind ``tensor``, with guard bands and padding, as integers of its width or of ``dtype``."""
    dtype = dtype or _BITS[tensor.element_size()]
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


def element_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` as integers of their width, which are equal only if every bit is: a view."""
    return tensor.view(_BITS[tensor.element_size()])


def poison(tensor: torch.Tensor, payload: int) -> None:
    """Fill the whole buffer behind ``tensor`` with the bit pattern ``payload`` (see POISONS)."""
    storage_bits(tensor).fill_(payload)


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements that hold one of the bit patterns of POISONS."""
    bits, (first, second) = element_bits(tensor), POISONS[tensor.dtype]
    return (bits == first) | (bits == second)


def fill_nan(tensor: torch.Tensor) -> None:
    """Fill the whole buffer behind ``tensor`` with the ordinary NaN (unlike POISONS), or the integer furthest from 0."""
    if tensor.dtype in _BYTE_NAN:
        storage_bits(tensor).fill_(_BYTE_NAN[tensor.dtype])
    elif not tensor.dtype.is_floating_point:
        bounds = torch.iinfo(tensor.dtype)
        storage_bits(tensor, tensor.dtype).fill_(bounds.min or bounds.max)
    else:
        storage_bits(tensor, tensor.dtype).fill_(math.nan)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from the first to the last element of ``tensor`` in one dimension, padding included."""
    return tensor.as_strided((Layout.of(tensor).span,), (1,))


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with one element along every dimension of stride 0: a writable view."""
    return tensor.as_strided(distinct_size(Layout.of(tensor)), tensor.stride())


def distinct_size(layout: Layout) -> tuple[int, ...]:
    """Return the layout's size with 1 for every dimension of stride 0."""
    return tuple(1 if s == 0 and n > 1 else n for n, s in zip(layout.size, layout.stride, strict=True))


def held_size(layout: Layout) -> tuple[int, ...]:
    """Return the size of the values that the layout can hold: ``distinct_size``, or its memory as one line if elements overlap."""
    return (layout.span,) if overlapping(layout) else distinct_size(layout)


def placed(layout: Layout, device: torch.device, values: torch.Tensor | None) -> torch.Tensor:
    """Return a buffer of the layout that holds ``values`` of ``held_size``, or nothing for None, and NaN everywhere else."""
    tensor = allocate(layout, device)
    fill_nan(tensor)
    if values is not None:
        target = flat(tensor) if overlapping(layout) else distinct(tensor)
        target.copy_(values.reshape(target.shape))
    return tensor


def overlapping(layout: Layout) -> bool:
    """Return True if elements share memory other than by a stride of 0. Rare interleaved layouts are counted too."""
    reach = 1
    for stride, size in sorted((s, n) for n, s in zip(layout.size, layout.stride, strict=True) if n > 1 and s > 0):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False
