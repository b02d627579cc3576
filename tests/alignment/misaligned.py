"""Operands that really lie at unaligned addresses, filled with integers, on which every summation order gives the same result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from gemmtune.choice import Choice, Kernel, Scalars, Tensors
from gemmtune.numerics.buffers import allocate
from gemmtune.ops import products
from gemmtune.problem import Layout

OFFSETS = range(9)
PADDINGS = (0, 1, 4, 8, 17)
"""Elements between the end of a row (or column) and the start of the next one."""
LARGEST = 2
"""Of the integers: sums of 64 products stay exact in bfloat16."""


def layouts(size: tuple[int, ...], dtype: torch.dtype, offsets: Iterable[int] = OFFSETS) -> dict[str, Layout]:
    """By a readable name: rows or columns with every padding, and every second element, each at every offset."""
    found: dict[str, Layout] = {}
    for offset in offsets:
        for order in ("rows", "columns"):
            for padding in PADDINGS:
                found[f"{order}+{padding}@{offset}"] = layout(size, dtype, order, padding, offset)
            found[f"every second of {order}@{offset}"] = layout(size, dtype, order, 0, offset, step=2)
    return found


def layout(size: tuple[int, ...], dtype: torch.dtype, order: str, padding: int, offset: int, step: int = 1) -> Layout:
    """One of ``layouts``. The matrices of a batch lie one after the other, with one element between them."""
    rows, cols = size[-2:]
    stride = (step * cols + padding, step) if order == "rows" else (step, step * rows + padding)
    span = (rows - 1) * stride[0] + (cols - 1) * stride[1] + 1
    return Layout(size=size, stride=(*((span + 1,) * (len(size) - 2)), *stride), dtype=dtype, offset=offset)


def filled(where: Layout, device: torch.device, seed: int = 0) -> torch.Tensor:
    """A tensor of that layout with integers from −LARGEST to LARGEST."""
    tensor = allocate(where, device)
    values = torch.randint(-LARGEST, LARGEST + 1, where.size, generator=torch.Generator().manual_seed(seed))
    assert tensor.data_ptr() % 16 == where.offset * where.dtype.itemsize % 16
    return tensor.copy_(values)


def sizes(op: str, m: int, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of a and b."""
    lead = (3,) if op == "bmm" else ()
    return (*lead, m, k), (*lead, k, n)


def called(op: str, a: torch.Tensor, b: torch.Tensor, inp: torch.Tensor | None, **options: Any) -> torch.Tensor:
    """gemmtune's operation on these operands; ``inp`` is for addmm."""
    return getattr(products, op)(*([inp] if op == "addmm" else []), a, b, **options)


def expected(op: str, a: torch.Tensor, b: torch.Tensor, inp: torch.Tensor | None) -> torch.Tensor:
    """The exact result."""
    product = a.double() @ b.double()
    return (product + inp.double() if op == "addmm" and inp is not None else product).to(a.dtype)


@contextlib.contextmanager
def every_run_watched(monkeypatch: pytest.MonkeyPatch, *kinds: type[Choice]) -> Iterator[list[tuple[str, Layout, Layout]]]:
    """A block in which each run of a choice of these classes asserts that its operands lie as the problem it was made for says.

    Gives the list of the runs: choice, layout of a, layout of b.
    """
    runs: list[tuple[str, Layout, Layout]] = []

    def watched(choice: Choice, kernel: Kernel) -> Kernel:
        def look(a: torch.Tensor, b: torch.Tensor) -> None:
            # A choice on copies gives the one inside addresses of its own in place of tensors.
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                assert (Layout.of(a), Layout.of(b)) == (choice.problem.a, choice.problem.b), choice.name
                runs.append((choice.name, Layout.of(a), Layout.of(b)))

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
            look(tensors[0], tensors[1])
            assert Layout.of(out) == choice.problem.out
            kernel.run(out, tensors, scalars)

        def run_new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:
            look(tensors[0], tensors[1])
            assert kernel.run_new is not None
            return kernel.run_new(tensors, scalars)

        return Kernel(run=run, run_new=run_new if kernel.run_new is not None else None)

    def watching(bind: Any) -> Any:
        return lambda choice, loaded: watched(choice, bind(choice, loaded))

    with monkeypatch.context() as patch:
        for kind in kinds:
            patch.setattr(kind, "bind", watching(kind.bind))
        yield runs
