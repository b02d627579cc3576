"""Tensors with exactly the layouts of a problem, in buffers that show a write outside of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..problem import Layout, Problem
from ..problem.dtypes import dtype_info
from ..problem.problem import ScalarClass

__all__ = [
    "ALPHA",
    "BETA",
    "POISONS",
    "SCALES",
    "Lines",
    "Operands",
    "allocate",
    "distinct",
    "distinct_size",
    "fill_nan",
    "fill_random",
    "flat",
    "guard_mask",
    "held_size",
    "overlapping",
    "placed",
    "poison",
    "random_operands",
    "random_scale",
    "scalar_value",
    "scale_factor",
    "storage_bits",
]

GUARD_BYTES = 256
"""Between the start of the buffer and the operand, and at least as much behind it; a multiple of every alignment of interest."""

ALPHA, BETA = 1.25, -0.75
"""The values of alpha and beta in random operands of class ``general``: exact in every dtype, and neither 0, 1 nor equal."""

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

SCALES = (0.5, 2.0)
"""Between these lie random scales of scaled_mm."""
Lines = slice | torch.Tensor | None
"""Some rows or columns; None means all of them."""

_BYTE_NAN: dict[torch.dtype, int] = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7E}
"""The ordinary NaN as bits, since not every torch fills 8-bit floats with numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The arguments of one call of a kernel: out = epilogue(alpha · a @ b + beta · inp, *extra).

    ``scale_a`` and ``scale_b`` are float32, and None for all but scaled_mm: out = (scale_a · scale_b) · (a @ b).
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    inp: torch.Tensor | None
    extra: tuple[torch.Tensor, ...]
    alpha: float
    beta: float
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None

    def largest(self) -> float:
        """max|a| + max|b|, which waits for the device; 0 for what has no elements."""
        return sum(float(_wide(x).abs().max()) for x in (self.a, self.b) if x.numel())

    def beside_subnormal(self) -> float:
        """``largest``, counting an input only where the other one has subnormal numbers, which may be read as 0."""
        pairs = ((self.a, self.b), (self.b, self.a))
        return sum(float(_wide(x).abs().max()) for x, other in pairs if x.numel() and _has_subnormal(other))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Of 8-bit floats torch has no maximum."""
    return x.float() if x.element_size() == 1 else x


def _has_subnormal(x: torch.Tensor) -> bool:
    magnitude = _wide(x).abs()
    return bool(((magnitude > 0) & (magnitude < dtype_info(x.dtype).smallest_normal)).any())


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


def fill_nan(tensor: torch.Tensor) -> None:
    """Fill the whole buffer behind ``tensor`` with the ordinary NaN, which can be told from POISONS; of integers the least one."""
    if tensor.dtype in _BYTE_NAN:
        storage_bits(tensor).fill_(_BYTE_NAN[tensor.dtype])
    elif dtype_info(tensor.dtype).is_integer:
        storage_bits(tensor, tensor.dtype).fill_(torch.iinfo(tensor.dtype).min)
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
    """From the first to the last element of ``tensor`` in memory as one dimension, padding between them included."""
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


def fill_random(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Standard normal numbers in every element, and in the padding between them; integers of the whole range for an integer dtype.

    Of a boolean tensor about half is true. Overlapping elements get what they can hold.
    """
    memory = flat(tensor)
    if memory.numel() == 0:
        return
    if tensor.dtype == torch.bool:  # a mask that an epilogue reads
        memory.random_(0, 2, generator=generator)
    elif dtype_info(tensor.dtype).is_integer:
        bounds = torch.iinfo(tensor.dtype)
        memory.random_(bounds.min, bounds.max + 1, generator=generator)
    elif tensor.element_size() == 1 or (tensor.device.type == "cpu" and tensor.element_size() == 2):
        # torch draws no 8-bit floats, and 16-bit ones one by one on a CPU
        memory.copy_(torch.empty(memory.numel(), device=memory.device).normal_(generator=generator))
    else:
        memory.normal_(generator=generator)


def scalar_value(scalar: ScalarClass, general: float) -> float:
    """0 or 1 for those classes, ``general`` for the class of that name."""
    return {"zero": 0.0, "one": 1.0, "general": general}[scalar]


def random_scale(layout: Layout, generator: torch.Generator, device: torch.device, *, exact: bool) -> torch.Tensor:
    """Scales between those of SCALES in a buffer of that layout: any numbers, or if ``exact`` powers of two: no rounding then."""
    low, high = SCALES
    values = torch.empty(held_size(layout), device=device).uniform_(low, high, generator=generator)
    return placed(layout, device, torch.exp2(values.log2().round()) if exact else values)


def scale_factor(operands: Operands, rows: Lines = None, cols: Lines = None) -> torch.Tensor | None:
    """scale_a · scale_b for these rows and columns, float64 [rows or 1, cols or 1], exact. None where there are no scales."""
    if operands.scale_a is None or operands.scale_b is None:
        return None
    return _lines(operands.scale_a, rows).unsqueeze(-1) * _lines(operands.scale_b, cols)


def _lines(scale: torch.Tensor, lines: Lines) -> torch.Tensor:
    values = scale.double().flatten()
    return values if lines is None or values.numel() == 1 else values[lines]


def random_operands(problem: Problem, device: torch.device, *, seed: int, out: bool = True) -> Operands:
    """Operands with the problem's layouts and standard normal values, made on ``device``.

    The numbers come from a generator of their own: torch's global state is not touched. ``inp`` is random even where beta is zero.
    With ``out=False`` the output is an empty tensor without memory, for callers that bring their own.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def filled(layout: Layout) -> torch.Tensor:
        tensor = allocate(layout, device)
        fill_random(tensor, generator)
        return tensor

    def scale(layout: Layout | None) -> torch.Tensor | None:
        return None if layout is None else random_scale(layout, generator, device, exact=False)

    return Operands(
        a=filled(problem.a),
        b=filled(problem.b),
        inp=filled(problem.inp) if problem.inp is not None else None,
        extra=tuple(filled(layout) for layout in (problem.epilogue.operands if problem.epilogue else ())),
        out=allocate(problem.out, device) if out else torch.empty(0, dtype=problem.out.dtype, device=device),
        alpha=scalar_value(problem.alpha, ALPHA),
        beta=scalar_value(problem.beta, BETA),
        scale_a=scale(problem.scale_a),
        scale_b=scale(problem.scale_b),
    )
