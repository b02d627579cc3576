"""Our kernels on aligned copies of their operands.

Rows that start at odd addresses can only be read element by element, which costs more than to copy them once: a first kernel copies
what is not aligned, with zeros appended, and a kernel then runs as on aligned operands. Zeros along K add nothing to a sum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from ...device import DeviceInfo
from ...problem import Layout, Problem
from ...problem.layout import ALIGNED_BYTES
from ...problem.rules import why_not_dense
from ...toolchain.render import template
from .build import KernelChoice
from .classes import SIGNATURE_DTYPES, Source
from .descriptors import turned
from .source import PACKAGE
from .wrapped import Copying, WrappedChoice, copying_source

TILE_ELEMENTS = 1024
WIDEST_TILE = 512
SIZES = ("programs", "rows", "cols", "to_rows", "to_cols")
"""What the copying kernel is told of an operand, beside strides."""
K_MULTIPLES = (64, 32, 16)
"""K is padded to the largest of these that adds at most a sixteenth of work, else to the last."""
MOST_EXTRA = 1 / 16
LEAST_USES = 16
MOST_BATCHES = 65535
"""The batch is an axis of the grid other than the first, which CUDA limits to this."""
Kernels = Callable[[Problem], Sequence[KernelChoice]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One operand to copy: from ``source`` to the row-major block [batch, rows, cols] (or its transpose) that ``target`` describes.

    ``turned`` tells that the operand's columns are the block's rows.
    """

    letter: str
    source: Layout
    target: Layout
    turned: bool

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of the copy, the columns being neighbours in memory."""
        size, stride = self.target.size, self.target.stride
        rows, cols = (size[-1], stride[-1]) if self.turned else (size[-2], stride[-2])
        return rows, cols

    @property
    def elements(self) -> int:
        """Elements of the copy over the whole batch."""
        rows, cols = self.block
        return self.batch * rows * cols

    @property
    def batch(self) -> int:
        """Matrices; 1 without a batch dimension."""
        return self.source.size[0] if len(self.source.size) == 3 else 1

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that one program copies."""
        cols = min(WIDEST_TILE, 1 << (self.block[1] - 1).bit_length())
        return TILE_ELEMENTS // cols, cols

    @property
    def programs(self) -> int:
        """Programs for one matrix."""
        (rows, cols), (tile_rows, tile_cols) = self.block, self.tile
        return -(-rows // tile_rows) * -(-cols // tile_cols)

    @property
    def constants(self) -> tuple[int, ...]:
        """The kernel's integers for this operand, in its order."""
        size, stride = self.source.size, self.source.stride
        rows, cols, row_stride, col_stride = size[-2], size[-1], stride[-2], stride[-1]
        if self.turned:
            rows, cols, row_stride, col_stride = cols, rows, col_stride, row_stride
        return (self.programs, rows, cols, *self.block, stride[0] if len(size) == 3 else 0, row_stride, col_stride)


@functools.lru_cache(maxsize=1024)
def copy_source(copies: tuple[Copy, ...], *, dependent: bool) -> Source:
    """The copying kernel for these operands. Sizes and strides are arguments; the tile and unit strides are part of the text.

    ``dependent``: it waits for the kernel before it by itself.
    """
    shapes = [(c.letter, *c.tile, c.constants[-1] == 1) for c in copies]
    text = template(PACKAGE, "pad.py.jinja").render(operands=shapes, dependent=dependent)
    kind = f"*{SIGNATURE_DTYPES[copies[0].source.dtype]}"
    arguments = [(f"{c.letter}_{end}", kind, divisor) for c in copies for end, divisor in (("from", 1), ("to", 16))]
    for c in copies:
        arguments += [(f"{c.letter}_{name}", "i32", 16 if name == "to_cols" else 1) for name in SIZES]
        arguments += [(f"{c.letter}_{name}_stride", "i64", 1) for name in ("batch", "row", "col")]
    return copying_source(text, "gemmtune_pad", arguments)


@dataclass(frozen=True, kw_only=True)
class PaddedChoice(WrappedChoice):
    """The kernel of a choice for the padded problem, behind one that makes the copies."""

    suffix = "_pad"
    copies: tuple[Copy, ...] = field(repr=False)

    def at(self, problem: Problem, device: DeviceInfo) -> Self | str:
        """The kernel for the padded problem, behind one that copies the same operands."""
        reason, padded = why_not_dense(problem), padded_problem(problem)
        if reason is not None or padded is None or [c.letter for c in padded[1]] != [c.letter for c in self.copies]:
            return reason or f"{self.name}: other operands are to be copied for {problem}"
        if problem.batch > MOST_BATCHES:
            return f"batch {problem.batch}: at most {MOST_BATCHES} are an axis of the grid"
        inner_problem, copies = padded
        inner = self.inner.at(inner_problem, device)
        return inner if isinstance(inner, str) else self.around(problem, inner, {"padded": self.info["padded"]}, copies=copies)

    @functools.cached_property
    def copying(self) -> Copying:
        """One launch for all copies, with an axis of the grid for the batch."""
        return Copying(
            source=copy_source(self.copies, dependent=self.inner.spec.dependent),
            grid=(sum(copy.programs for copy in self.copies), self.copies[0].batch, 1),
            dtype=self.problem.dtype,
            elements=tuple(("ab".index(copy.letter), copy.elements) for copy in self.copies),
            constants=tuple(value for copy in self.copies for value in copy.constants),
        )


def padded_problem(problem: Problem) -> tuple[Problem, tuple[Copy, ...]] | None:
    """The problem on aligned copies and what to copy for it; None where every operand can be read 16 bytes at a time as it is."""
    k = padded_k(problem.k)
    copies: list[Copy] = []
    for letter, layout in (("a", problem.a), ("b", problem.b)):
        if k == problem.k and layout.alignment * layout.dtype.itemsize >= ALIGNED_BYTES:
            continue
        along_k = -1 if letter == "a" else -2
        across = turned(layout)
        copies.append(Copy(letter=letter, source=layout, target=padded_layout(layout, along_k, k, across=across), turned=across))
    if not copies:
        return None
    targets = {copy.letter: copy.target for copy in copies}
    return dataclasses.replace(problem, a=targets.get("a", problem.a), b=targets.get("b", problem.b)), tuple(copies)


def padded_k(k: int) -> int:
    """K with its zeros."""
    for multiple in K_MULTIPLES:
        padded = -(-k // multiple) * multiple
        if padded - k <= MOST_EXTRA * k:
            return padded
    return -(-k // K_MULTIPLES[-1]) * K_MULTIPLES[-1]


def padded_layout(layout: Layout, along_k: int, k: int, *, across: bool) -> Layout:
    """The copy of an operand as the mm kernel sees it: K padded, rows at multiples of 16 elements, the other size as it was."""
    size = list(layout.size)
    size[along_k] = k
    rows, cols = (size[-1], size[-2]) if across else (size[-2], size[-1])
    pitch = -(-cols // 16) * 16
    stride = (1, pitch) if across else (pitch, 1)
    lead = (rows * pitch,) if len(size) == 3 else ()
    return Layout(size=tuple(size), stride=(*lead, *stride), dtype=layout.dtype)


def padded_choices(problem: Problem, device: DeviceInfo, kernels: Kernels) -> list[PaddedChoice]:
    """The choices on padded operands, none where padding cannot pay. ``kernels`` gives those of a problem, the padded one.

    Copies pay where each element is used several times, and need a GPU: on the CPU only the interpreter runs Triton. A kernel is
    launched while they are made where it can wait for them by itself.
    """
    used_often = min(problem.m, problem.n) >= LEAST_USES and problem.batch <= MOST_BATCHES
    worth_it = why_not_dense(problem) is None and device.type != "cpu" and used_often
    padded = padded_problem(problem) if worth_it else None
    if padded is None:
        return []
    inner_problem, copies = padded
    info = {"padded": [copy.letter for copy in copies]}
    overlapping = (k if k.config.pdl else next(iter(k.launch_variants()), k) for k in kernels(inner_problem))
    return [PaddedChoice.around(problem, kernel, info, copies=copies) for kernel in overlapping]
