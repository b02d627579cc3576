"""GEMMs of somebody else's, right and broken ones, as the selector is given them by name."""

from __future__ import annotations

import os
import time

import torch

from gemmtune.conformance import gemm

Tensor = torch.Tensor
declared = gemm(deterministic=True, dtypes=("float32",), devices=("cpu",), threads=True)


@declared
def right(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b)


@gemm(deterministic=True, ops=("addmm",), dtypes=("float32",), alpha=True, out=True, bias=("n",), bias_name="inp")
def right_addmm(a: Tensor, b: Tensor, *, inp: Tensor, alpha: float, out: Tensor | None = None) -> Tensor:
    return torch.addmm(inp, a, b, alpha=alpha) if out is None else torch.addmm(inp, a, b, alpha=alpha, out=out)


@declared
def off_by_little(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b) + 1e-3


@declared
def aborts(a: Tensor, b: Tensor) -> Tensor:
    os.abort()


@declared
def hangs(a: Tensor, b: Tensor) -> Tensor:
    time.sleep(1000)
    return torch.mm(a, b)


@declared
def raises(a: Tensor, b: Tensor) -> Tensor:
    raise NotImplementedError("no such strides")


@declared
def transposed(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b).t()


@declared
def wide(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b).double()


_kept: dict[tuple[int, ...], Tensor] = {}


@declared
def reuses_memory(a: Tensor, b: Tensor) -> Tensor:
    out = _kept.setdefault((a.shape[0], b.shape[1]), a.new_empty(a.shape[0], b.shape[1]))
    return torch.mm(a, b, out=out)


@declared
def changes_its_input(a: Tensor, b: Tensor) -> Tensor:
    result = torch.mm(a, b)
    a.neg_()
    return result


def undeclared(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b)


BROKEN = {
    "off_by_little": ("wrong_result", "expected"),
    "aborts": ("crashed", "SIGABRT"),
    "hangs": ("timed_out", "choice_timeout_s"),
    "raises": ("runtime_error", "NotImplementedError: no such strides"),
    "transposed": ("runtime_error", r"returned float32\[5, 4\] on cpu, expected float32\[4, 5\]"),
    "wide": ("runtime_error", r"returned float64\[4, 5\] on cpu, expected float32"),
    "reuses_memory": ("runtime_error", "memory that is the next call's result"),
    "changes_its_input": ("wrong_result", "changed its input"),
}
"""The status and reason that each broken one is left out with."""
