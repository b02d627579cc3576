"""The words template for a warp group: a is first copied in the order in which its fragments meet the numbers of words."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....choice import Kernel, Run, Scalars, Tensors
from ....device import DeviceInfo
from ....problem import Layout, Problem
from ....toolchain.render import template
from ..launcher import Launcher, launcher_of
from ..source import PACKAGE, SIGNATURE_DTYPES, Argument, Source
from ..wrapped import Helper, WrappedChoice
from .configs import WordsConfig, word_format
from .words import WordsChoice

__all__ = ["OrderedChoice", "ordered_choice", "ordered_problem"]

TEMPLATE = "mixed/order.py.jinja"
BLOCK = 1024
ORDER_WARPS = 4


@dataclass(frozen=True, kw_only=True)
class OrderedChoice(WrappedChoice):
    """A WordsChoice for the problem with a in its order, behind a kernel that makes that copy."""

    suffix = ""

    @functools.cached_property
    def helper(self) -> Helper:
        """The copying kernel."""
        source = order_source(self.problem.dtype, word_format(self.problem).bits, dependent=self.inner.spec.dependent)
        return Helper(name=self.name, source=source, warps=ORDER_WARPS, target=self.inner.target)

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
    return OrderedChoice.around(problem, WordsChoice.of(ordered_problem(problem), device, config), {})


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
