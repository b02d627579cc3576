"""GEMMs that pass every check before the timing, and are fast because they do not compute what they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch

Run = Callable[[torch.Tensor, tuple[torch.Tensor, ...], object], None]
CALLS_S = 0.0002
"""Time of an honest call here, so that the dishonest ones look faster."""


def honest(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
    a, b, *_rest = tensors
    end = time.perf_counter() + CALLS_S
    torch.mm(a, b, out=out)
    while time.perf_counter() < end:
        pass


def keeping(key: Callable[[torch.Tensor, torch.Tensor], Hashable]) -> Run:
    """Return a GEMM that keeps each result under a key of its operands."""
    kept: dict[Hashable, torch.Tensor] = {}

    def run(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
        a, b, *_rest = tensors
        name = (tuple(a.shape), key(a, b))
        if name not in kept:
            kept[name] = a @ b
        out.copy_(kept[name])

    return run


def right_for(calls: int) -> Run:
    """Return a GEMM that is right so many times and writes zeros from then on."""
    count = 0

    def run(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
        nonlocal count
        count += 1
        if count > calls:
            out.zero_()
        else:
            torch.mm(*tensors[:2], out=out)

    return run


def made_ready() -> Run:
    """Return a GEMM that transforms each b once, by its address, and reads a anew."""
    ready: dict[int, torch.Tensor] = {}

    def run(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
        a, b, *_rest = tensors
        torch.mm(a, ready.setdefault(b.data_ptr(), b.clone()), out=out)

    return run


DISHONEST: dict[str, Callable[[], Run]] = {
    "kept_by_version": lambda: keeping(lambda a, b: (a.data_ptr(), a._version, b.data_ptr(), b._version)),
    "kept_by_address": lambda: keeping(lambda a, b: (a.data_ptr(), b.data_ptr())),
    "kept_by_object": lambda: keeping(lambda a, b: (a.untyped_storage().data_ptr(), id(b))),
    "kept_by_number_of_b": lambda: keeping(lambda a, b: (a.data_ptr(), float(b[0, 0]), float(b[-1, -1]))),
    "kept_by_number_of_a": lambda: keeping(lambda a, b: (a.data_ptr(), float(a[0, 0]), b.data_ptr())),
    "kept_by_numbers": lambda: keeping(lambda a, b: (a.data_ptr(), float(a[0, 0]), float(b[0, 0]))),
    "right_for_60": lambda: right_for(60),
    "made_ready": made_ready,
}
"""Makers of the GEMMs by name, each with a memory of its own."""
