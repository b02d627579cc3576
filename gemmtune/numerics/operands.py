"""Tensors with exactly the layouts of a problem, in buffers that show a write outside of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..problem import Layout, Problem
from ..problem.problem import ScalarClass

__all__ = [
    "ALPHA",
    "BETA",
    "POISONS",
    "Operands",
    "allocate",
    "distinct",
    "fill_nan",
    "fill_random",
    "flat",
    "guard_mask",
    "overlapping",
    "poison",
    "random_operands",
    "scalar_value",
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
}
"""Two quiet NaNs for each dtype, with payloads that no arithmetic makes: an element that holds one was not written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The arguments of one call of a kernel: out = epilogue(alpha · a @ b + beta · inp, *extra)."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    inp: torch.Tensor | None
    extra: tuple[torch.Tensor, ...]
    alpha: float
    beta: float


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
    """Fill the whole buffer behind ``tensor`` with the NaN of bit pattern ``payload`` (see POISONS)."""
    storage_bits(tensor).fill_(payload)


def fill_nan(tensor: torch.Tensor) -> None:
    """Fill the whole buffer behind ``tensor`` with the ordinary NaN, which can be told from POISONS."""
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
    size = tuple(1 if s == 0 and n > 1 else n for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.as_strided(size, tensor.stride())


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
    """Standard normal numbers in every element, and in the padding between them. Overlapping elements get what they can hold."""
    memory = flat(tensor)
    if memory.numel() == 0:
        return
    if tensor.device.type == "cpu" and tensor.element_size() == 2:  # 16-bit numbers are drawn one by one on a CPU
        memory.copy_(torch.empty(memory.numel()).normal_(generator=generator))
    else:
        memory.normal_(generator=generator)


def scalar_value(scalar: ScalarClass, general: float) -> float:
    """0 or 1 for those classes, ``general`` for the class of that name."""
    return {"zero": 0.0, "one": 1.0, "general": general}[scalar]


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

    return Operands(
        a=filled(problem.a),
        b=filled(problem.b),
        inp=filled(problem.inp) if problem.inp is not None else None,
        extra=tuple(filled(layout) for layout in (problem.epilogue.operands if problem.epilogue else ())),
        out=allocate(problem.out, device) if out else torch.empty(0, dtype=problem.out.dtype, device=device),
        alpha=scalar_value(problem.alpha, ALPHA),
        beta=scalar_value(problem.beta, BETA),
    )
