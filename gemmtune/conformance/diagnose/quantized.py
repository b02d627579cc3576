"""Bugs of quantized operands: scales and zero points of other elements, wrong unpacking, integer sums that are too narrow."""

import dataclasses
from collections.abc import Iterator

import torch

from ...numerics.buffers import storage_bits
from ...problem import Layout
from ...problem.dtypes import FLOAT8, dtype_info, dtype_name
from .evidence import Matrix, View
from .match import Suspect

_NARROW = (torch.bfloat16, torch.float16)
FIRST = torch.zeros(1, dtype=torch.int64)
"""Index of the first row or column."""


def weights(view: View) -> Iterator[Suspect]:
    """Yield suspects of mixed_mm: b unpacked wrongly, zero points and scales dropped or misapplied."""
    if not view.problem.widens_b:
        return
    numbers, scale, zero = view.stored("b"), view.scale_of("b"), view.zero_of()
    for text, other in _misread(view, numbers):
        yield Suspect(text, view.of(b=(other - zero) * scale))
    if view.problem.zero_b is not None:
        yield Suspect("zero points dropped", view.of(b=numbers * scale))
        yield Suspect("zero points added", view.of(b=(numbers + zero) * scale))
        yield Suspect("zero points subtracted after the scales were applied", view.of(b=numbers * scale - zero))
        yield Suspect("zero points dropped, and scales too", view.of(b=numbers))
        for text, rows, cols in _elsewhere(view, "b"):
            moved = view.zero_of(rows=rows, cols=cols)
            yield Suspect(f"zero points {text}", view.of(b=(numbers - moved) * scale))
            both = (numbers - moved) * view.scale_of("b", rows=rows, cols=cols)
            yield Suspect(f"scales and zero points {text}", view.of(b=both))


def _misread(view: View, numbers: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (text, numbers of b) for a kernel that unpacks or interprets b wrongly."""
    encoding, dtype = view.problem.encoding, view.problem.b.dtype
    if encoding:
        yield "low and high four bits exchanged", view.stored("b", rows=view.inner ^ 1)
        yield "the low four bits read twice", view.stored("b", rows=view.inner & ~1)
        yield "the high four bits read twice", view.stored("b", rows=view.inner | 1)
        half = view.problem.k // 2
        yield "the high four bits taken for the second half of K", view.stored("b", rows=view.inner % half * 2 + view.inner // half)
    if encoding == "int4" or dtype == torch.int8:
        yield "b read as unsigned integers", torch.where(numbers < 0, numbers + (16 if encoding else 256), numbers)
    if encoding == "uint4" or (dtype == torch.uint8 and not encoding):
        most = 8 if encoding else 128
        yield "b read as signed integers", torch.where(numbers >= most, numbers - 2 * most, numbers)
    if encoding == "int4":
        yield "b read as int4 with an offset of 8", torch.where(numbers < 0, numbers + 16, numbers) - 8


def blocks(view: View) -> Iterator[Suspect]:
    """Yield suspects whose scales of a or b are dropped, repeated, rounded, or taken from other elements."""
    if not view.scaled_inside:
        return
    sides: tuple[Matrix, ...] = ("a", "b")
    for which in sides:
        layout = view.problem.scale_a if which == "a" else view.problem.scale_b
        if layout is None:
            continue
        name, scale = f"scale_{which}", view.scale_of(which)
        yield Suspect(f"{name} dropped", _with(view, which, torch.ones_like(scale)))
        yield Suspect(f"{name} applied twice", _with(view, which, scale * scale))
        yield Suspect(f"first element of {name} used for all", _with(view, which, view.scale_of(which, rows=FIRST, cols=FIRST)))
        for text, rows, cols in _elsewhere(view, which):
            yield Suspect(f"{name} {text}", _with(view, which, view.scale_of(which, rows=rows, cols=cols)))
        if which == "b" and layout.size == (1, view.problem.n) and view.problem.n > 1:
            transposed = view.scale_of("b", rows=FIRST, cols=view.inner % view.problem.n).mT
            yield Suspect("scale_b on the wrong axis", _with(view, "b", transposed))
        for dtype in _NARROW:
            if dtype_info(dtype).unit_roundoff > dtype_info(layout.dtype).unit_roundoff:
                yield Suspect(f"{name} read as {dtype_name(dtype)}", _with(view, which, scale.to(dtype).double()))


def strides(view: View) -> Iterator[Suspect]:
    """Yield suspects that read scales or zero points as if these were contiguous."""
    operands = view.evidence.operands
    for name in ("scale_a", "scale_b", "zero_b"):
        scale: torch.Tensor | None = getattr(operands, name)
        if scale is None or scale.is_contiguous():
            continue
        buffer = storage_bits(scale, scale.dtype)
        place = int(scale.storage_offset()) + torch.arange(scale.numel(), device=scale.device)
        dense = buffer[place.clamp_max(len(buffer) - 1)].view(scale.shape)
        other = dataclasses.replace(view.evidence, operands=dataclasses.replace(operands, **{name: dense}))  # type: ignore[arg-type]
        yield Suspect(f"{name} read as contiguous, strides ignored", View(other).result())


def floats(view: View) -> Iterator[Suspect]:
    """Yield suspects that take the bits of an 8-bit float for those of the other kind."""
    sides: tuple[tuple[Matrix, Layout], ...] = (("a", view.problem.a), ("b", view.problem.b))
    for which, layout in sides:
        for other in FLOAT8 if layout.dtype in FLOAT8 else ():
            numbers = view.stored(which).to(layout.dtype).view(other).double()
            numbers = numbers * view.scale_of(which) if view.scaled_inside else numbers
            yield Suspect(f"bits of {which} taken for {dtype_name(other)}", view.of(**{which: numbers}))


def _with(view: View, which: Matrix, scale: torch.Tensor) -> torch.Tensor:
    """Return the result with another scale of a or b."""
    if which == "a":
        return view.of(a=view.stored("a") * scale)
    return view.of(b=(view.stored("b") - view.zero_of()) * scale)


def _elsewhere(view: View, which: Matrix) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (text, rows, columns) of the elements whose scales a kernel may use by mistake."""
    problem = view.problem
    rows, cols = view.lines(which)
    line, block = problem.scale_block("scale_a" if which == "a" else "scale_b")
    if which == "a":
        line, block = block, line
    inner, outer = (cols, rows) if which == "a" else (rows, cols)
    extent = problem.m if which == "a" else problem.n

    def placed(along: torch.Tensor, across: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (across, along) if which == "a" else (along, across)

    if line < problem.k:
        last = (problem.k - 1) // line * line
        for text, along in (
            ("of the next block along K", inner + line),
            ("of the block before along K", inner - line),
            ("of the next block used for the last element of each along K", inner + 1),
            ("of the block before used for the first element of each along K", inner - 1),
            ("of the first block used all along K", torch.zeros_like(inner)),
            ("of the block before used for the remainder of K", inner.clamp_max(last - 1)),
            ("of blocks twice as long along K", inner // 2),
            ("of blocks half as long along K", inner * 2),
        ):
            yield (text, *placed(along, outer))
    if block < extent:
        for text, across in (
            ("of the next one across", outer + block),
            ("of the one before across", outer - block),
            ("of the first one used for all across", torch.zeros_like(outer)),
        ):
            yield (text, *placed(inner, across))


def factors(view: View) -> Iterator[Suspect]:
    """Yield suspects of int_mm_mul: a factor dropped, repeated or on the wrong axis, sums rounded before it."""
    operands = view.evidence.operands
    if not operands.extra:
        return
    plain, (m, n), factor = view.a @ view.b, (view.problem.m, view.problem.n), operands.extra[0].double().cpu()
    yield Suspect("factor dropped", plain)
    yield Suspect("factor applied twice", plain * view.scales**2)
    if factor.numel() > 1:
        yield Suspect("first element of the factor used for all", plain * factor.flatten()[0])
        lines, length = (view.rows, n) if factor.numel() == n and factor.shape[-1] == n else (view.cols, m)
        swapped = factor.flatten()[lines % length]
        yield Suspect("factor on the wrong axis", plain * (swapped.unsqueeze(-1) if lines is view.rows else swapped))
    for dtype in (torch.float16, torch.bfloat16):
        yield Suspect(f"sums rounded to {dtype_name(dtype)} before the factor", plain.to(dtype).double() * view.scales)
        narrow = view.scales.to(dtype).double()
        yield Suspect(f"factor read as {dtype_name(dtype)}", plain * narrow)


def clamped_pairs(view: View) -> Iterator[Suspect]:
    """Yield suspects that sum two int8 products in 16 bits, as vector instructions for smaller numbers do."""
    if view.problem.dtype != torch.int8:
        return
    low, high = torch.iinfo(torch.int16).min, torch.iinfo(torch.int16).max
    even = view.problem.k // 2 * 2
    terms = view.a[..., :even].unsqueeze(-1) * view.b[:, :even].unsqueeze(1)
    pairs = terms[:, :, ::2] + terms[:, :, 1::2]
    rest = view.a[..., even:] @ view.b[:, even:]
    yield Suspect("sums of two products clamped to 16 bits", view.result((pairs.clamp(low, high).sum(2) + rest) * view.scales))
    wrapped = (pairs - low) % 2**16 + low
    yield Suspect("sums of two products wrapped at 16 bits", view.result((wrapped.sum(2) + rest) * view.scales))
