"""Triton kernels on aligned copies of their operands.

Rows that start at odd addresses can only be read element by element, which costs more than copying them once. A first kernel copies
the unaligned operands and appends zeros. A second kernel then runs as on aligned operands. Zeros along K do not change a sum.
"""

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
from ...toolchain.triton_kernels import Source
from .build import KernelChoice
from .classes import SIGNATURE_DTYPES
from .descriptors import is_transposed
from .printer import PACKAGE
from .wrapped import Copying, WrappedChoice, copying_source

TILE_ELEMENTS = 1024
WIDEST_TILE = 512
SIZES = ("programs", "rows", "cols", "to_rows", "to_cols")
"""Integers that the copying kernel takes for each operand, in addition to strides."""
K_MULTIPLES = (64, 32, 16)
"""Candidate multiples for padding K: the largest that adds at most a sixteenth of work, else the last."""
MOST_EXTRA = 1 / 16
LEAST_USES = 16
MOST_BATCHES = 65535
"""Most matrices in a batch: CUDA limits the grid axes other than the first to this."""
Kernels = Callable[[Problem], Sequence[KernelChoice]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One operand to copy from ``source`` to the row-major block [batch, rows, cols] in ``target``, or its transpose there."""

    letter: str
    source: Layout
    target: Layout
    transposed: bool

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of the copy; columns are contiguous."""
        size, stride = self.target.size, self.target.stride
        rows, cols = (size[-1], stride[-1]) if self.transposed else (size[-2], stride[-2])
        return rows, cols

    @property
    def elements(self) -> int:
        rows, cols = self.block
        return self.batch * rows * cols

    @property
    def batch(self) -> int:
        """Number of matrices; 1 without a batch dimension."""
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
        """Integer arguments for this operand, in the kernel's order."""
        size, stride = self.source.size, self.source.stride
        rows, cols, row_stride, col_stride = size[-2], size[-1], stride[-2], stride[-1]
        if self.transposed:
            rows, cols, row_stride, col_stride = cols, rows, col_stride, row_stride
        return (self.programs, rows, cols, *self.block, stride[0] if len(size) == 3 else 0, row_stride, col_stride)


@functools.lru_cache(maxsize=1024)
def copy_source(copies: tuple[Copy, ...], *, dependent: bool) -> Source:
    """Return the copying kernel, with tile and unit strides in its text. ``dependent``: it waits for the previous kernel."""
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
    """Choice that copies operands, then runs the kernel of a choice for the padded problem."""

    suffix = "_pad"
    copies: tuple[Copy, ...] = field(repr=False)

    def at(self, problem: Problem, device: DeviceInfo) -> Self | str:
        reason, padded = why_not_dense(problem), padded_problem(problem)
        if reason is not None or padded is None or [c.letter for c in padded[1]] != [c.letter for c in self.copies]:
            return reason or f"{self.name}: {problem} needs copies of other operands"
        if problem.batch > MOST_BATCHES:
            return f"batch {problem.batch}: at most {MOST_BATCHES} are an axis of the grid"
        inner_problem, copies = padded
        inner = self.inner.at(inner_problem, device)
        return inner if isinstance(inner, str) else self.around(problem, inner, {"padded": self.info["padded"]}, copies=copies)

    @functools.cached_property
    def copying(self) -> Copying:
        """Single launch for all copies, with a grid axis for the batch."""
        return Copying(
            source=copy_source(self.copies, dependent=self.inner.spec.dependent),
            grid=(sum(copy.programs for copy in self.copies), self.copies[0].batch, 1),
            dtype=self.problem.dtype,
            elements=tuple(("ab".index(copy.letter), copy.elements) for copy in self.copies),
            constants=tuple(value for copy in self.copies for value in copy.constants),
        )


def padded_problem(problem: Problem) -> tuple[Problem, tuple[Copy, ...]] | None:
    """Return the problem on aligned copies and the copies to make; None if every operand allows 16-byte reads already."""
    k = padded_k(problem.k)
    copies: list[Copy] = []
    for letter, layout in (("a", problem.a), ("b", problem.b)):
        if k == problem.k and layout.alignment * layout.dtype.itemsize >= ALIGNED_BYTES:
            continue
        along_k = -1 if letter == "a" else -2
        across = is_transposed(layout)
        copies.append(
            Copy(letter=letter, source=layout, target=padded_layout(layout, along_k, k, across=across), transposed=across)
        )
    if not copies:
        return None
    targets = {copy.letter: copy.target for copy in copies}
    return dataclasses.replace(problem, a=targets.get("a", problem.a), b=targets.get("b", problem.b)), tuple(copies)


def padded_k(k: int) -> int:
    """Return K with its padding."""
    padded = [-(-k // multiple) * multiple for multiple in K_MULTIPLES]
    return next((size for size in padded if size - k <= MOST_EXTRA * k), padded[-1])


def padded_layout(layout: Layout, along_k: int, k: int, *, across: bool) -> Layout:
    """Return the layout of the copy for the mm kernel: K padded, rows at multiples of 16 elements, the other size unchanged."""
    size = list(layout.size)
    size[along_k] = k
    rows, cols = (size[-1], size[-2]) if across else (size[-2], size[-1])
    pitch = -(-cols // 16) * 16
    stride = (1, pitch) if across else (pitch, 1)
    lead = (rows * pitch,) if len(size) == 3 else ()
    return Layout(size=tuple(size), stride=(*lead, *stride), dtype=layout.dtype)


def padded_choices(problem: Problem, device: DeviceInfo, kernels: Kernels) -> list[PaddedChoice]:
    """Return the choices on padded operands; none if padding cannot pay. ``kernels`` gives the choices for the padded problem.

    Copies pay if each element is used several times. They need a GPU: on the CPU Triton only runs in its interpreter. A kernel is
    launched while the copies are made if it can wait for them itself.
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
