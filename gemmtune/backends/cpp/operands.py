"""How the kernels read the operands: numbers of what kind, scaled or not, and how many of them there are in a step along K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ...device import DeviceInfo
from ...problem import Layout, Problem
from ...problem.operations import Encoding

Groups = Literal["", "rows", "terms"]
"""What of a product is divided into groups."""
VECTOR_BYTES = {"avx512": 64, "avx2": 32, "portable": 16}
EVERYTHING = 48
_VNNI_FLAGS = {torch.int32: {"avx512": "avx512_vnni", "avx2": "avx_vnni"}, torch.float32: {"avx512": "avx512_bf16"}}
"""The flags of Linux for a multiply-add of bytes or of pairs of bfloat16, as wide as the vectors of the other kernels, by what it
adds to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The operand on one side of the product. ``scale`` and ``zero`` are places in ``Problem.scales``."""

    dtype: torch.dtype
    encoding: Encoding = ""
    scale: int | None = None
    zero: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Oriented:
    """The operands as the kernels see them: with ``swapped``, outᵀ = bᵀ aᵀ is computed."""

    a: Layout
    b: Layout
    out: Layout
    swapped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWords:
    """What one scale covers, and where the next one is: rows of the operand on the left (columns on the right), and along K.

    It covers 2^shift of them; with ``EVERYTHING`` that is more than there can be.
    """

    row_shift: int
    k_shift: int
    row: int
    k: int


def divided(problem: Problem) -> Groups:
    """What groups of the problem have for themselves."""
    return "" if not problem.groups else "terms" if problem.divides_terms else "rows"


def oriented(problem: Problem, nr: int) -> Oriented:
    """The side of the product on which the columns of the micro-tile lie.

    Swapped is a result stored by columns, and one too narrow for a micro-tile. A prepacked b stays where it is, and so do groups.
    """
    by_columns = problem.out.stride[-1] != 1 and problem.out.stride[-2] == 1 and problem.m > 1
    narrow = problem.n < nr and problem.m > 2 * problem.n
    if problem.prepacked or problem.groups or not (by_columns or narrow):
        return Oriented(a=problem.a, b=problem.b, out=problem.out, swapped=False)
    return Oriented(a=problem.b.transposed, b=problem.a.transposed, out=problem.out.transposed, swapped=True)


def sides(problem: Problem, *, swapped: bool) -> tuple[Side, Side]:
    """Left and right operand, in the order in which the kernels have them."""
    names = [name for name in ("scale_a", "scale_b", "zero_b") if getattr(problem, name) is not None]
    place = {name: i for i, name in enumerate(names)}
    left = Side(dtype=problem.a.dtype, scale=place.get("scale_a"))
    right = Side(dtype=problem.b.dtype, encoding=problem.encoding, scale=place.get("scale_b"), zero=place.get("zero_b"))
    return (right, left) if swapped else (left, right)


def scale_words(problem: Problem) -> tuple[ScaleWords, ...]:
    """The words of a plan about each of ``Problem.scales``."""
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


def uses_vnni(problem: Problem, device: DeviceInfo, *, direct: bool = False) -> bool:
    """The device has an instruction that multiplies and adds bytes, or pairs of bfloat16, and the problem has those to multiply.

    Rows of b that are read in place (``direct``) have no pairs: they are widened.
    """
    pairs = {problem.a.dtype, problem.b.dtype} == {torch.bfloat16} and problem.sparsity is None
    if problem.accumulator != torch.int32 and (not pairs or (direct and not problem.prepacked)):
        return False
    return _VNNI_FLAGS[problem.accumulator].get(device.arch) in device.isa


def numbers_per_step(accumulator: torch.dtype, arch: str, *, vnni: bool) -> int:
    """Numbers along K in one element of a packed panel: bytes, 16-bit numbers, or as wide as the sums."""
    if accumulator != torch.int32:
        return 2 if vnni else 1
    if arch == "portable":
        return 1
    return 4 if vnni else 2
