"""A process whose Triton interprets: Triton decides at its import, and the process of the tests is to compile."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from processes import Run, process

from gemmtune.problem import Layout

__all__ = ["MEMORY", "interpreting_process"]


class Memory:
    """The memory of the tensors that a kernel is given, each from its first element to its last: nothing else may be touched.

    A GPU shows only what is written beside an operand, or read where nothing is mapped.
    """

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.outside: list[str] | None = None
        """What was touched outside of it, where that is no error."""

    def add(self, given: object) -> None:
        """Let kernels touch a tensor, that of a descriptor, or all in a tuple."""
        if isinstance(given, tuple):
            for part in given:
                self.add(part)
        elif hasattr(given, "base"):
            self.add(given.base)
        elif isinstance(given, torch.Tensor) and given.layout == torch.strided and given.numel():
            self.ranges.append((given.data_ptr(), given.data_ptr() + Layout.of(given).span * given.element_size()))

    def check(self, pointers: Any, mask: Any, how: str) -> None:
        """Raise unless what is not masked is the memory of one tensor."""
        places = np.broadcast_to(pointers.data, mask.data.shape)[mask.data]
        if not places.size:
            return
        first, last = int(places.min()), int(places.max()) + pointers.get_element_ty().primitive_bitwidth // 8
        if any(begin <= first and last <= end for begin, end in self.ranges):
            return
        beyond = min((max(begin - first, last - end) for begin, end in self.ranges), default=0)
        told = f"a kernel {how} outside of its tensors, by {beyond} bytes at least"
        if self.outside is None:
            raise AssertionError(told)
        self.outside.append(told)


MEMORY = Memory()
"""That of the interpreting process."""
TOUCHING = {"create_masked_load": ("reads", 0, 1), "create_masked_store": ("writes", 0, 2), "create_atomic_rmw": ("adds", 1, 3)}
"""The interpreter's methods that touch memory: how, and the places of addresses and of the mask among the arguments."""


def _product(a: Any, b: Any, dtype: Any) -> Any:
    """Multiply the operands of ``tl.dot``. A BLAS may sum the terms of a row in an order that depends on its place in the tile."""
    a, b = (np.ascontiguousarray(x, dtype) for x in (a, b))
    return np.einsum("...ik,...kj->...ij", a, b)


def _start() -> None:
    """Check each address, and leave out the check of each sum of integers for an overflow of 32 bits, which takes a third of the
    time; sizes are small."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    launch = importlib.import_module("gemmtune.backends.triton.launch")
    builder, execute, by_triton = interpreter.interpreter_builder, interpreter.GridExecutor.__call__, launch._by_triton
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    def checked(original: Any, how: str, pointers: int, mask: int, *given: Any, **named: Any) -> Any:
        MEMORY.check(given[pointers], given[mask], how)
        return original(*given, **named)

    interpreter.np.matmul = _product
    for name, (how, pointers, mask) in TOUCHING.items():
        setattr(builder, name, functools.partial(checked, getattr(builder, name), how, pointers, mask))

    def bound(*given: Any) -> Any:
        run = by_triton(*given)

        def noted(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], scalars: tuple[float, ...]) -> None:
            MEMORY.ranges.clear()
            MEMORY.add((out, *tensors))
            run(out, tensors, scalars)

        return noted

    def executed(self: Any, *given: Any, **named: Any) -> None:
        MEMORY.add(given)
        execute(self, *given, **named)

    launch._by_triton, interpreter.GridExecutor.__call__ = bound, executed


@contextlib.contextmanager
def interpreting_process() -> Iterator[Run]:
    """Start the process, and end it."""
    with process(TRITON_INTERPRET="1") as run:
        run(_start)
        yield run
