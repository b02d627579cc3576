"""Operands of the CPU kernels: number types, scales, and numbers per step along K."""

from dataclasses import dataclass
from typing import Literal

import torch

from ...device import DeviceInfo
from ...problem import Layout, Problem
from ...problem.operations import Encoding

Groups = Literal["", "rows", "terms"]
"""Dimension of a product that groups divide, or "" without groups."""
VECTOR_BYTES = {"avx512": 64, "avx2": 32, "portable": 16}
EVERYTHING = 48
WIDEST_PANEL = 64
"""Columns of a result that no micro-tile exceeds, so that the product is not computed transposed for being narrow."""
_VNNI_FLAGS = {torch.int32: {"avx512": "avx512_vnni", "avx2": "avx_vnni"}, torch.float32: {"avx512": "avx512_bf16"}}
"""Linux CPU flags for multiply-adds of bytes or bfloat16 pairs, keyed by accumulator dtype and instruction set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Operand on one side of the product. ``scale`` and ``zero`` are indices into ``Problem.scales``."""

    dtype: torch.dtype
    encoding: Encoding = ""
    scale: int | None = None
    zero: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Oriented:
    """Operands as the kernels see them. With ``swapped`` the kernels compute outᵀ = bᵀ aᵀ."""

    a: Layout
    b: Layout
    out: Layout
    swapped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWords:
    """Coverage, 2^shift or EVERYTHING, and strides of a scale along the left operand's rows (the right's columns) and along K."""

    row_shift: int
    k_shift: int
    row: int
    k: int


def divided(problem: Problem) -> Groups:
    return "" if not problem.groups else "terms" if problem.divides_terms else "rows"


def oriented(problem: Problem, nr: int) -> Oriented:
    """Return the operands, swapped if the result is column-major or too narrow, unless b is prepacked or has groups."""
    by_columns = problem.out.stride[-1] != 1 and problem.out.stride[-2] == 1 and problem.m > 1
    narrow = problem.n < nr and problem.m > 2 * problem.n
    if problem.prepacked or problem.groups or not (by_columns or narrow):
        return Oriented(a=problem.a, b=problem.b, out=problem.out, swapped=False)
    return Oriented(a=problem.b.transposed, b=problem.a.transposed, out=problem.out.transposed, swapped=True)


def sides(problem: Problem, *, swapped: bool) -> tuple[Side, Side]:
    names = [name for name in ("scale_a", "scale_b", "zero_b") if getattr(problem, name) is not None]
    place = {name: i for i, name in enumerate(names)}
    left = Side(dtype=problem.a.dtype, scale=place.get("scale_a"))
    right = Side(dtype=problem.b.dtype, encoding=problem.encoding, scale=place.get("scale_b"), zero=place.get("zero_b"))
    return (right, left) if swapped else (left, right)


def scale_words(problem: Problem) -> tuple[ScaleWords, ...]:
    """Return a plan's words for each of ``Problem.scales``."""
    found = []
    for name in ("scale_a", "scale_b", "zero_b"):
        layout: Layout | None = getattr(problem, name)
        if layout is None:
            continue
        block = problem.scale_block(name)
        stride = layout.stride[-2:] if len(layout.stride) >= 2 else (0, 0)
        row = 0 if name == "scale_a" else 1
        size = ((problem.m, problem.n)[row], problem.k)
        # Legal blocks are powers of two, or as large as the operand.
        shifts = [EVERYTHING if block[i] >= n else block[i].bit_length() - 1 for i, n in zip((row, 1 - row), size, strict=True)]
        found.append(ScaleWords(row_shift=shifts[0], k_shift=shifts[1], row=stride[row], k=stride[1 - row]))
    return tuple(found)


def uses_vnni(problem: Problem, device: DeviceInfo, *, direct: bool = False, dots: bool = False) -> bool:
    """Return True if the device multiplies and adds such bytes or bfloat16 pairs. ``direct`` rows of b have no pairs.

    Packing a narrow weight makes pairs of it, unless the product is computed transposed. ``dots`` read it in place.
    """
    pairs = {problem.a.dtype, problem.b.dtype} == {torch.bfloat16} and problem.sparsity is None
    if problem.widens_b and problem.a.dtype == torch.bfloat16:
        pairs = not (direct or dots or problem.prepacked) and problem.n >= WIDEST_PANEL and problem.out.stride[-1] == 1
    if problem.accumulator != torch.int32 and (not pairs or (direct and not problem.prepacked)):
        return False
    return _VNNI_FLAGS[problem.accumulator].get(device.arch) in device.isa


def numbers_per_step(accumulator: torch.dtype, arch: str, *, vnni: bool) -> int:
    """Return the numbers along K in one element of a packed panel, which is as wide as a sum."""
    if accumulator != torch.int32:
        return 2 if vnni else 1
    if arch == "portable":
        return 1
    return 4 if vnni else 2
