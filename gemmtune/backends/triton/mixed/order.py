"""The words template for a warp group: a is first copied in the order in which its fragments meet the numbers of words."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from ....choice import Kernel, Run, Scalars, Tensors
from ....device import DeviceInfo
from ....problem import Layout, Problem
from ....toolchain.compiled import Artifact, CompiledChoice
from ....toolchain.render import template
from ..artifact import copy_artifact
from ..kernels import compile_kernel, initialise, kernel_key, marker, use_ptx
from ..launch import Launcher, launcher_of
from ..source import PACKAGE, SIGNATURE_DTYPES, Argument, Source
from .configs import WordsConfig, word_format
from .words import WordsChoice, words_choice

__all__ = ["OrderedChoice", "ordered_choice", "ordered_problem"]

TEMPLATE = "mixed/order.py.jinja"
BLOCK = 1024
ORDER_WARPS = 4


@dataclass(frozen=True, kw_only=True)
class OrderedChoice(CompiledChoice):
    """A WordsChoice for the problem with a in its order, behind a kernel that makes that copy."""

    inner: WordsChoice = field(repr=False)

    @functools.cached_property
    def source(self) -> Source:
        """The copying kernel."""
        return order_source(self.problem.dtype, word_format(self.problem).bits, dependent=self.inner.spec.dependent)

    @functools.cached_property
    def _order_key(self) -> str:
        return kernel_key(self.source, 1, ORDER_WARPS)

    @property
    def content_hash(self) -> str:
        """Over both kernels, and how they are launched."""
        return hashlib.sha256(f"{self.inner.content_hash} after {self._order_key}".encode()).hexdigest()

    @property
    def compile_key(self) -> str | None:
        """Equal for shapes of one alignment class."""
        return f"{self.inner.compile_key}-after-{self._order_key}"

    @property
    def compiled(self) -> bool:
        """Were both kernels compiled here before?"""
        assert self.inner.target is not None
        return self.inner.compiled and marker(self._order_key, self.inner.target).exists()

    @property
    def arch(self) -> str:
        """That of both kernels."""
        return self.inner.arch

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        """The copying kernel, then the other one."""
        return (copy_artifact(self._compile_order()), *self.inner.artifacts(device))

    def launch_variants(self) -> Sequence[Self]:
        """The same kernels with the other answer to whether their launches may overlap the kernel before."""
        return tuple(
            dataclasses.replace(self, name=inner.name, info={**self.info, "pdl": inner.config.pdl}, inner=inner)
            for inner in self.inner.launch_variants()
        )

    def forward(self) -> Self:
        """Both kernels from their PTX."""
        return dataclasses.replace(self, inner=self.inner.forward())

    def compile(self) -> None:
        """Compile both kernels. Raises CompileError."""
        self.inner.compile()
        self._compile_order()

    def _compile_order(self) -> Any:
        assert self.inner.target is not None
        return compile_kernel(self.name, self.source, self._order_key, self.inner.target, stages=1, warps=ORDER_WARPS)

    def load(self) -> tuple[Any, Any]:
        """The kernel that copies, and the one that multiplies. Raises as ``KernelChoice.load``."""
        compiled = self._compile_order()
        if self.inner.from_ptx:
            use_ptx(compiled)
        initialise(compiled)
        return compiled, self.inner.load()

    def bind(self, loaded: tuple[Any, Any]) -> Kernel:
        """Bind both kernels to the current device. The copy lives in memory that each call takes from torch's allocator."""
        compiled, multiplying = loaded
        grid = (self.problem.m, -(-self.problem.k // BLOCK), 1)
        call = launcher_of(compiled, grid, pdl=self.inner.config.pdl)
        return Kernel(run=bind(call, self.problem.a, self.inner.bind(multiplying).run, torch.cuda.current_device()))


def bind(call: Launcher, layout: Layout, inner: Run, device: int) -> Run:
    """Copy a, which has ``layout``, then run ``inner`` on the copy."""
    size, where = layout.size, torch.device("cuda", device)
    constants = (size[1], *layout.stride)
    stream_of = torch._C._cuda_getCurrentRawStream

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        copy = torch.empty(size, dtype=layout.dtype, device=where)
        values = (tensors[0].data_ptr(), copy.data_ptr(), *constants)
        arguments: tuple[Any, ...] = (values,) if call.packed else values
        call.function(*call.grid, stream_of(device), *call.middle, *arguments)
        inner(out, (copy, *tensors[1:]), scalars)

    return run


def ordered_problem(problem: Problem) -> Problem:
    """The problem with the copy of a."""
    return dataclasses.replace(problem, a=Layout.contiguous(problem.a.size, problem.a.dtype))


def ordered_choice(problem: Problem, device: DeviceInfo, config: WordsConfig) -> OrderedChoice:
    """The choice that runs ``problem`` with ``config``, one with fragments that is legal for ``ordered_problem``."""
    inner = words_choice(ordered_problem(problem), device, config)
    return OrderedChoice(name=inner.name, backend=inner.backend, problem=problem, claims=inner.claims, info=inner.info, inner=inner)


@functools.lru_cache(maxsize=64)
def order_source(dtype: torch.dtype, bits: int, *, dependent: bool) -> Source:
    """The copying kernel. Sizes and strides are arguments."""
    text = template(PACKAGE, TEMPLATE).render(bits=bits, block=BLOCK, dependent=dependent)
    pointers = [
        Argument(name=name, type=f"*{SIGNATURE_DTYPES[dtype]}", source=("pointer", "a"), divisor=divisor)
        for name, divisor in (("a_from", 1), ("a_to", 16))
    ]
    numbers = [
        Argument(name=name, type=kind, source=("runtime", name), divisor=divisor)
        for name, kind, divisor in (("K", "i32", 16), ("row_stride", "i64", 1), ("col_stride", "i64", 1))
    ]
    return Source(text=text, function="gemmtune_order", arguments=(*pointers, *numbers))
