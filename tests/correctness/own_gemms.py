"""Foreign GEMMs, right and broken ones, that the selector gets by name."""

from __future__ import annotations

import os
import time
from typing import ClassVar

import torch

import gemmtune
from gemmtune.conformance import gemm
from gemmtune.problem.grouped_compositions import added_by_token, gated_columns

Tensor = torch.Tensor
declared = gemm(deterministic=True, dtypes=("float32",), devices=("cpu",), threads=True)


@declared
def right(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b)


@declared
def by_our_products(a: Tensor, b: Tensor) -> Tensor:
    k = a.shape[1] // 2
    return gemmtune.mm(a[:, :k], b[:k]) + gemmtune.mm(a[:, k:], b[k:])


in_parts_of_8 = gemm(deterministic=True, dtypes=("float32",), devices=("cpu",), threads=True, reduction="fma/8")


def _summed(a: Tensor, b: Tensor, length: int) -> Tensor:
    """Return the sum of partial sums over ``length`` elements of K, by operations that treat every element alike."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for begin in range(0, a.shape[1], length):
        part = torch.zeros_like(total)
        for k in range(begin, min(begin + length, a.shape[1])):
            part = part + a[:, k : k + 1] * b[k]
        total = total + part
    return total


@in_parts_of_8
def in_parts(a: Tensor, b: Tensor) -> Tensor:
    return _summed(a, b, 8)


@in_parts_of_8
def in_parts_for_many_rows(a: Tensor, b: Tensor) -> Tensor:
    return _summed(a, b, 8 if a.shape[0] > 3 else a.shape[1])


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


@gemm(dtypes=("float32",), deterministic=False)
def unordered(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b)


def undeclared(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


@gemm(dtypes=("float32",))
def undeclared_in_part(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b)


def undeclared_float32(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype != torch.float32 or a.dim() != 2:
        raise NotImplementedError("float32 matrices alone")
    return torch.mm(a, b)


def undeclared_in_random_order(a: Tensor, b: Tensor) -> Tensor:
    order = torch.randperm(a.shape[-1])
    return a[..., order] @ b[..., order, :]


def undeclared_wrong(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b) * 1.01


def undeclared_tf32(a: Tensor, b: Tensor) -> Tensor:
    return a @ (b.view(torch.int32) & -8192).view(torch.float32)


def undeclared_crash(a: Tensor, b: Tensor) -> Tensor:
    os.abort()


def undeclared_on_another_stream(a: Tensor, b: Tensor) -> Tensor:
    stream = _streams.setdefault(a.get_device(), torch.cuda.Stream(a.device))
    with torch.cuda.stream(stream):
        return torch.matmul(a, b)


_streams: dict[int, torch.cuda.Stream] = {}
UNDECLARED = {
    "undeclared": ("ok", "^$"),
    "undeclared_in_part": ("ok", "^$"),
    "undeclared_float32": ("ok", "^$"),
    "undeclared_in_random_order": ("refused", "^undeclared: equal inputs gave other bits, which deterministic forbids"),
    "undeclared_wrong": ("wrong_result", "out"),
    "undeclared_tf32": ("wrong_result", "out"),
    "undeclared_crash": ("crashed", "SIGABRT"),
}
"""Functions without declarations, or without some, with the status and the reason of a float32 product."""


class EveryOperation:
    """A GEMM for each operation that can be declared, with torch's or gemmtune's signature."""

    gemm_traits: ClassVar = {
        "deterministic": True, "alpha": True, "beta": True, "bias": ["n", "mn"],
        "weights": ["int4"], "scales": ["tensor", "column"], "gates": ["silu"],
    }  # fmt: skip
    mm, addmm, bmm, baddbmm = torch.mm, torch.addmm, torch.bmm, torch.baddbmm
    int_mm = torch._int_mm

    @staticmethod
    def mm_plus_mm(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return torch.addmm(torch.mm(a, b), c, d)

    @staticmethod
    def int_mm_mul(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        return torch._int_mm(a, b) * scale

    @staticmethod
    def mixed_mm(a: Tensor, b: Tensor, *, scale_b: Tensor, encoding: str) -> Tensor:
        return a @ (EveryOperation.unpacked(b, encoding) * scale_b)

    @staticmethod
    def unpacked(b: Tensor, encoding: str) -> Tensor:
        """Return the numbers of a packed matrix."""
        low, high = (b << 4).view(torch.int8) >> 4, b.view(torch.int8) >> 4
        assert encoding == "int4"
        return torch.stack([low, high], 1).flatten(0, 1)

    @staticmethod
    def scaled_mm(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)

    @staticmethod
    def bsr_mm(bsr: Tensor, x: Tensor) -> Tensor:
        return bsr.to_dense() @ x

    @staticmethod
    def bsr_addmm(inp: Tensor, bsr: Tensor, x: Tensor, *, beta: float, alpha: float) -> Tensor:
        return beta * inp + alpha * (bsr.to_dense() @ x)

    @staticmethod
    def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        ends = offs.tolist()
        pieces = [a[begin:end] @ b[g] for g, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))]
        return torch.cat([*pieces, a.new_zeros((len(a) - ends[-1], b.shape[-1]))])

    @staticmethod
    def grouped_k_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        ends = offs.tolist()
        return torch.stack([a[:, begin:end] @ b[begin:end] for begin, end in zip([0, *ends], ends, strict=False)])

    @classmethod
    def mixed_grouped_mm(cls, a: Tensor, b: Tensor, *, scale_b: Tensor, offs: Tensor, encoding: str) -> Tensor:
        return cls.grouped_mm(a, torch.stack([cls.unpacked(x, encoding) for x in b]) * scale_b, offs=offs)

    @classmethod
    def scaled_grouped_mm(
        cls, a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        return cls.grouped_mm(a.float() * scale_a, b.float() * scale_b, offs=offs).to(out_dtype)

    @classmethod
    def routed_grouped_mm(cls, a: Tensor, b: Tensor, *, offs: Tensor, gated: str) -> Tensor:
        return gated_columns(cls.grouped_mm(a, b, offs=offs), gated)

    @classmethod
    def combined_grouped_mm(cls, a: Tensor, b: Tensor, *, offs: Tensor, scatter: tuple[Tensor, Tensor]) -> Tensor:
        slots, weights = scatter
        return added_by_token(cls.grouped_mm(a, b, offs=offs), offs, slots, weights)


every_operation = EveryOperation()

BROKEN = {
    "off_by_little": ("wrong_result", "expected"),
    "aborts": ("crashed", "SIGABRT"),
    "hangs": ("timed_out", "choice_timeout_s"),
    "raises": ("runtime_error", "NotImplementedError: no such strides"),
    "transposed": ("runtime_error", r"returned float32\[5, 4\] on cpu, expected float32\[4, 5\]"),
    "wide": ("runtime_error", r"returned float64\[4, 5\] on cpu, expected float32"),
    "reuses_memory": ("runtime_error", "memory that is also the next call's result"),
    "changes_its_input": ("wrong_result", "changed its input"),
}
"""Status and reason with which each broken GEMM is left out."""
