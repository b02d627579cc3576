"""The mm template on aligned copies of its operands.

Rows that start at odd addresses can only be read element by element, which costs more than to copy them once: a first kernel copies
what is not aligned, with zeros appended, and the mm kernel then runs as on aligned operands. Zeros along K add nothing to a sum.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from ...choice import Kernel, Run
from ...device import DeviceInfo
from ...problem import Layout, Problem
from ...problem.layout import ALIGNED_BYTES
from ..compiled import Artifact, CompiledChoice
from ..render import environment, load_template
from .artifact import copy_artifact
from .build import TritonChoice, choice_for
from .configs import Config
from .kernels import compile_kernel, initialise, kernel_key, marker, use_ptx
from .launch import Launcher, launcher_of
from .source import PACKAGE, SIGNATURE_DTYPES, Argument, Source

__all__ = ["PADDED_CHOICES", "PaddedChoice", "padded_choices"]

PADDED_CHOICES = {"quick": 3, "default": 8, "exhaustive": 24}
"""How many configs a search tries on padded operands."""
PAD_WARPS = 4
TILE_ELEMENTS = 2048
WIDEST_TILE = 512
K_MULTIPLES = (64, 32, 16)
"""K is padded to the largest of these that adds at most a sixteenth of work, else to the last."""
MOST_EXTRA = 1 / 16
LEAST_USES = 16
MOST_BATCHES = 65535
"""The batch is an axis of the grid other than the first, which CUDA limits to this."""


ConfigSource = Callable[[Problem], Sequence[Config]]


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


@dataclass(frozen=True, kw_only=True)
class PaddedChoice(CompiledChoice):
    """A TritonChoice for the padded problem, behind a kernel that makes the copies."""

    inner: TritonChoice = field(repr=False)
    copies: tuple[Copy, ...] = field(repr=False)

    @functools.cached_property
    def source(self) -> Source:
        """The copying kernel."""
        return copy_source(self.copies)

    @functools.cached_property
    def _copy_key(self) -> str:
        return kernel_key(self.source, 1, PAD_WARPS)

    @property
    def content_hash(self) -> str:
        """Over both kernels."""
        return hashlib.sha256(f"{self.inner.content_hash} after {self._copy_key}".encode()).hexdigest()

    @property
    def compile_key(self) -> str | None:
        """Equal for shapes of one alignment class."""
        return f"{self.inner.compile_key}-after-{self._copy_key}"

    @property
    def compiled(self) -> bool:
        """Were both kernels compiled here before?"""
        assert self.inner.target is not None
        return self.inner.compiled and marker(self._copy_key, self.inner.target).exists()

    @property
    def arch(self) -> str:
        """That of both kernels."""
        return self.inner.arch

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        """The copying kernel, then those of the mm."""
        return (copy_artifact(self._compile_copy()), *self.inner.artifacts(device))

    def forward(self) -> Self:
        """Both kernels from their PTX."""
        return dataclasses.replace(self, inner=self.inner.forward())

    def compile(self) -> None:
        """Compile both kernels. Raises CompileError."""
        self.inner.compile()
        self._compile_copy()

    def _compile_copy(self) -> Any:
        assert self.inner.target is not None
        return compile_kernel(self.name, self.source, self._copy_key, self.inner.target, stages=1, warps=PAD_WARPS)

    def build(self) -> Kernel:
        """Bind both kernels to the current device. The copies live in memory that each call takes from torch's allocator."""
        compiled = self._compile_copy()
        if self.inner.from_ptx:
            use_ptx(compiled)
        initialise(compiled)
        grid = (sum(copy.programs for copy in self.copies), self.copies[0].batch, 1)
        return Kernel(run=bind(launcher_of(compiled, grid), self.copies, self.inner.build().run, torch.cuda.current_device()))


class _Address:
    """Stands for a tensor where only its address is asked."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def bind(call: Launcher, copies: Sequence[Copy], inner: Run, device: int) -> Run:
    """Copy, then run ``inner`` on the copies."""
    dtype = copies[0].source.dtype
    total = sum(copy.elements for copy in copies)
    letters = [copy.letter for copy in copies]
    steps = [copy.elements * dtype.itemsize for copy in copies]
    constants = tuple(value for copy in copies for value in copy.constants)
    stream_of = torch._C._cuda_getCurrentRawStream
    where = torch.device("cuda", device)

    def run(out: Tensor, a: Tensor, b: Tensor, inp: Tensor | None, alpha: float, beta: float, extra: tuple[Tensor, ...]) -> None:
        operands: dict[str, Any] = {"a": a, "b": b}
        buffer = torch.empty(total, dtype=dtype, device=where)
        address = buffer.data_ptr()
        pointers: list[int] = []
        for letter, step in zip(letters, steps, strict=True):
            pointers += (operands[letter].data_ptr(), address)
            operands[letter] = _Address(address)
            address += step
        values = (*pointers, *constants)
        arguments: tuple[Any, ...] = (values,) if call.packed else values
        call.function(*call.grid, stream_of(device), *call.middle, *arguments)
        inner(out, operands["a"], operands["b"], inp, alpha, beta, extra)

    return run


def padded_problem(problem: Problem) -> tuple[Problem, tuple[Copy, ...]] | None:
    """The problem on aligned copies and what to copy for it; None where every operand can be read 16 bytes at a time as it is."""
    k = padded_k(problem.k)
    copies: list[Copy] = []
    for letter, layout in (("a", problem.a), ("b", problem.b)):
        if k == problem.k and layout.alignment * layout.dtype.itemsize >= ALIGNED_BYTES:
            continue
        along_k = -1 if letter == "a" else -2
        turned = layout.stride[-1] != 1 and layout.stride[-2] == 1
        copies.append(Copy(letter=letter, source=layout, target=padded_layout(layout, along_k, k, turned=turned), turned=turned))
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


def padded_layout(layout: Layout, along_k: int, k: int, *, turned: bool) -> Layout:
    """The copy of an operand as the mm kernel sees it: K padded, rows at multiples of 16 elements, the other size as it was."""
    size = list(layout.size)
    size[along_k] = k
    rows, cols = (size[-1], size[-2]) if turned else (size[-2], size[-1])
    pitch = -(-cols // 16) * 16
    stride = (1, pitch) if turned else (pitch, 1)
    lead = (rows * pitch,) if len(size) == 3 else ()
    return Layout(size=tuple(size), stride=(*lead, *stride), dtype=layout.dtype)


def padded_choices(problem: Problem, device: DeviceInfo, count: int, configs: ConfigSource) -> list[PaddedChoice]:
    """Up to ``count`` choices on padded operands, none where padding cannot pay. ``configs`` gives those of a problem."""
    padded = padded_problem(problem) if worth_padding(problem, device) else None
    if padded is None:
        return []
    inner_problem, copies = padded
    return [padded_choice(problem, choice_for(inner_problem, device, config), copies) for config in configs(inner_problem)[:count]]


def padded_choice(problem: Problem, inner: TritonChoice, copies: tuple[Copy, ...]) -> PaddedChoice:
    """The choice that runs ``inner``, made for the padded problem, on copies."""
    return PaddedChoice(
        name=f"{inner.name}_pad",
        backend=inner.backend,
        problem=problem,
        claims=inner.claims,
        info={**inner.info, "padded": [copy.letter for copy in copies]},
        inner=inner,
        copies=copies,
    )


def worth_padding(problem: Problem, device: DeviceInfo) -> bool:
    """Copies pay where each element is used several times, and need a GPU: on the CPU only the interpreter runs Triton."""
    return device.type != "cpu" and min(problem.m, problem.n) >= LEAST_USES and problem.batch <= MOST_BATCHES


@functools.lru_cache(maxsize=1024)
def copy_source(copies: tuple[Copy, ...]) -> Source:
    """The copying kernel for these operands. Sizes and strides are arguments; the tile and unit strides are part of the text."""
    shapes = [(c.letter, *c.tile, c.constants[-1] == 1) for c in copies]
    text = environment().from_string(load_template(PACKAGE, "pad.py.jinja")).render(operands=shapes)
    pointers = [
        Argument(
            name=f"{c.letter}_{end}", type=f"*{SIGNATURE_DTYPES[c.source.dtype]}", source=("pointer", c.letter), divisor=divisor
        )
        for c in copies
        for end, divisor in (("from", 1), ("to", 16))
    ]
    numbers = [
        Argument(
            name=f"{c.letter}_{name}",
            type="i64" if "stride" in name else "i32",
            source=("runtime", name),
            divisor=16 if name == "to_cols" else 1,
        )
        for c in copies
        for name in ("programs", "rows", "cols", "to_rows", "to_cols", "batch_stride", "row_stride", "col_stride")
    ]
    return Source(text=text, function="gemmtune_pad", arguments=(*pointers, *numbers))
