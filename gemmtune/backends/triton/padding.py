"""Our kernels on aligned copies of their operands.

Rows that start at odd addresses can only be read element by element, which costs more than to copy them once: a first kernel copies
what is not aligned, with zeros appended, and a kernel then runs as on aligned operands. Zeros along K add nothing to a sum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...choice import Kernel, Run, Scalars, Tensors
from ...device import DeviceInfo
from ...problem import Layout, Problem
from ...problem.layout import ALIGNED_BYTES
from ...problem.rules import why_not_dense
from .build import KernelChoice
from .copies import Copy, copy_source
from .descriptors import turned
from .launcher import Launcher, launcher_of
from .wrapped import Helper, WrappedChoice

__all__ = ["PaddedChoice", "padded_choices"]

PAD_WARPS = 4
K_MULTIPLES = (64, 32, 16)
"""K is padded to the largest of these that adds at most a sixteenth of work, else to the last."""
MOST_EXTRA = 1 / 16
LEAST_USES = 16
MOST_BATCHES = 65535
"""The batch is an axis of the grid other than the first, which CUDA limits to this."""


Kernels = Callable[[Problem], Sequence[KernelChoice]]


@dataclass(frozen=True, kw_only=True)
class PaddedChoice(WrappedChoice):
    """The kernel of a choice for the padded problem, behind one that makes the copies."""

    suffix = "_pad"
    copies: tuple[Copy, ...] = field(repr=False)

    @functools.cached_property
    def helper(self) -> Helper:
        """The copying kernel."""
        source = copy_source(self.copies, dependent=self.inner.spec.dependent)
        return Helper(name=self.name, source=source, warps=PAD_WARPS, target=self.inner.target)

    def bind(self, loaded: tuple[Any, Any]) -> Kernel:
        """Bind both kernels to the current device. The copies live in memory that each call takes from torch's allocator."""
        compiled, multiplying = loaded
        grid = (sum(copy.programs for copy in self.copies), self.copies[0].batch, 1)
        call = launcher_of(compiled, grid, pdl=self.inner.config.pdl)
        return Kernel(run=bind(call, self.copies, self.inner.bind(multiplying).run, torch.cuda.current_device()))


class _Address:
    """Stands for a tensor where only its address and its dtype are asked."""

    __slots__ = ("_address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address = address
        self.dtype = dtype

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

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        operands: dict[str, Any] = {"a": tensors[0], "b": tensors[1]}
        buffer = torch.empty(total, dtype=dtype, device=where)
        address = buffer.data_ptr()
        pointers: list[int] = []
        for letter, step in zip(letters, steps, strict=True):
            pointers += (operands[letter].data_ptr(), address)
            operands[letter] = _Address(address, dtype)
            address += step
        values = (*pointers, *constants)
        arguments: tuple[Any, ...] = (values,) if call.packed else values
        call.function(*call.grid, stream_of(device), *call.middle, *arguments)
        inner(out, (operands["a"], operands["b"], *tensors[2:]), scalars)

    return run


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
    """The choices on padded operands, none where padding cannot pay. ``kernels`` gives those of a problem, the padded one."""
    padded = padded_problem(problem) if worth_padding(problem, device) else None
    if padded is None:
        return []
    inner_problem, copies = padded
    info = {"padded": [copy.letter for copy in copies]}
    return [PaddedChoice.around(problem, _overlapping(kernel), info, copies=copies) for kernel in kernels(inner_problem)]


def _overlapping(kernel: KernelChoice) -> KernelChoice:
    """The kernel, launched while the copies are made where it can wait for them by itself."""
    return kernel if kernel.config.pdl else next(iter(kernel.launch_variants()), kernel)


def worth_padding(problem: Problem, device: DeviceInfo) -> bool:
    """Copies pay where each element is used several times, and need a GPU: on the CPU only the interpreter runs Triton."""
    return (
        why_not_dense(problem) is None
        and device.type != "cpu"
        and min(problem.m, problem.n) >= LEAST_USES
        and problem.batch <= MOST_BATCHES
    )
