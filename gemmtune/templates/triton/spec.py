"""What a Triton kernel is compiled for: classes of layouts rather than layouts, so that one kernel serves many shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...problem import Epilogue, Layout, Problem
from ...problem.problem import ScalarClass
from .configs import Config

__all__ = ["Edge", "IntClass", "KernelSpec", "OperandClass", "divisor", "specialise"]

ALIGNED_BYTES = 16
INT32_LIMIT = 2**31
SMALL_BLOCK = 16
"""Tiles of so few rows are for problems of so few rows: masked always, so that M = 1 and M = 16 share a kernel."""
STEP_LIMIT = 2**22
"""A stride of a matrix that reaches this is given in 64 bits, so that a step of up to 256 of them cannot overflow."""
WIDE_MARGIN = 2**24
"""Room below 2^31 for the index arithmetic of a tile that hangs over the edge of an operand."""


def divisor(value: int, limit: int = ALIGNED_BYTES) -> int:
    """The largest power of two up to ``limit`` that divides ``value``; ``limit`` for 0."""
    return limit if value == 0 else min(value & -value, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntClass:
    """What the compiler is told of one size or stride.

    ``constant`` is its value where that is part of the kernel, else None; ``divisor`` a power of two that divides it; ``wide``
    whether it needs 64 bits.
    """

    constant: int | None = None
    divisor: int = 1
    wide: bool = False

    @classmethod
    def of(cls, value: int, *, static: bool, constants: tuple[int, ...] = (), limit: int = INT32_LIMIT) -> IntClass:
        """The class of ``value``: a constant if ``static`` or one of ``constants``, else an argument with its divisor."""
        if static or value in constants:
            return cls(constant=value)
        return cls(divisor=divisor(value), wide=value >= limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandClass:
    """What the compiler is told of one operand: always three strides (batch, row, column), 0 where it is broadcast.

    ``pointer_divisor`` is the alignment of the address in bytes, ``wide`` whether offsets inside one matrix may pass 2^31 elements.
    """

    dtype: torch.dtype
    strides: tuple[IntClass, IntClass, IntClass]
    pointer_divisor: int
    wide: bool

    @classmethod
    def of(cls, layout: Layout, shape: tuple[int, int, int], *, static: bool, broadcast: bool = False) -> OperandClass:
        """The class of ``layout`` broadcast to (batch, rows, columns). ``broadcast``: it is an operand of the epilogue."""
        strides = strides_of(layout, shape)
        reach = sum((n - 1) * s for n, s in zip(shape[1:], strides[1:], strict=True))
        classes = [
            _lone_stride(s)
            if n == 1 and not broadcast and not static
            else IntClass.of(s, static=static, constants=(0, 1), limit=INT32_LIMIT if dim == 0 else STEP_LIMIT)
            for dim, (n, s) in enumerate(zip(shape, strides, strict=True))
        ]
        return cls(
            dtype=layout.dtype,
            strides=(classes[0], classes[1], classes[2]),
            pointer_divisor=divisor(layout.offset * layout.dtype.itemsize),
            wide=reach + WIDE_MARGIN >= INT32_LIMIT,
        )

    @property
    def contiguous_dim(self) -> int | None:
        """1 if elements of a column are neighbours, 2 for a row, None for neither; a row where both hold."""
        for dim in (2, 1):
            if self.strides[dim].constant == 1:
                return dim
        return None


def strides_of(layout: Layout, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Strides along (batch, row, column) of a layout broadcast to ``shape``. A stride that no index ever multiplies is 1 if it is 1
    already, else 0."""
    full = layout.expanded(shape)
    values = tuple(s if n != 1 or s == 1 else 0 for n, s in zip(full.size, full.stride, strict=True))
    return values[0], values[1], values[2]


def _lone_stride(stride: int) -> IntClass:
    """The class of a stride along a dimension of size 1: an argument that happens to be 0, so M = 1 and M = 16 share a kernel."""
    return IntClass(constant=1) if stride == 1 else IntClass(divisor=ALIGNED_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """How a tile that hangs over the edge of M or N is read: ``mask`` reads zeros, ``clamp`` reads the last row or column again.

    Clamping costs nothing in the loop but breaks up the contiguous dimension, and a tile that is mostly outside would fetch the
    same row many times.
    """

    m: str
    n: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """Everything that the source of a kernel depends on. Equal specs are one compilation."""

    a: OperandClass
    b: OperandClass
    out: OperandClass
    inp: OperandClass | None
    extra: tuple[OperandClass, ...]
    m: IntClass
    n: IntClass
    k: IntClass
    batched: bool
    even_k: bool
    edge: Edge
    alpha: ScalarClass
    beta: ScalarClass
    epilogue: Epilogue | None
    """The graph alone: its operands' layouts are in ``extra`` as classes."""
    input_precision: str
    accumulator: torch.dtype
    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    split: bool
    interpret: bool


def specialise(problem: Problem, config: Config, *, static: bool = False, interpret: bool = False) -> KernelSpec:
    """The kernel that serves ``problem`` with ``config``.

    With ``static``, sizes and strides are constants of the kernel; else they are arguments, of which the kernel knows whether they
    are 0 or 1, by which power of two they divide, and whether they need 64 bits.
    """
    batch, m, n, k = problem.batch, problem.m, problem.n, problem.k
    shape = (batch, m, n)
    operands = problem.epilogue.operands if problem.epilogue else ()
    a = OperandClass.of(problem.a, (batch, m, k), static=static)
    b = OperandClass.of(problem.b, (batch, k, n), static=static)
    out = OperandClass.of(problem.out, shape, static=static)
    reads_inp = problem.inp is not None and problem.beta != "zero"
    inp = OperandClass.of(problem.inp, shape, static=static, broadcast=True) if problem.inp is not None and reads_inp else None
    extra = tuple(OperandClass.of(layout, shape, static=static, broadcast=True) for layout in operands)
    epilogue_side = (out, *([inp] if inp else []), *extra)
    even_k = k % config.block_k == 0
    return KernelSpec(
        a=a,
        b=b,
        out=out,
        inp=inp,
        extra=extra,
        m=_size_class(m, static, any(x.contiguous_dim == 1 for x in (a, *epilogue_side))),
        n=_size_class(n, static, any(x.contiguous_dim == 2 for x in (b, *epilogue_side))),
        k=_size_class(k, static, not even_k and (a.contiguous_dim == 2 or b.contiguous_dim == 1)),
        batched=batch > 1,
        even_k=even_k,
        edge=Edge(
            m=_edge(a.contiguous_dim == 1, m, config.block_m),
            n=_edge(b.contiguous_dim == 2, n, config.block_n),
        ),
        alpha=problem.alpha,
        beta=problem.beta if reads_inp else "zero",
        epilogue=Epilogue(nodes=problem.epilogue.nodes) if problem.epilogue else None,
        input_precision=problem.precision.input_mode,
        accumulator=problem.accumulator,
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        stages=config.stages,
        warps=config.warps,
        split=config.split_k > 1,
        interpret=interpret,
    )


def _size_class(size: int, static: bool, masks_contiguous: bool) -> IntClass:
    """A divisor only helps where the size bounds the contiguous dimension of a masked access; elsewhere it would split kernels."""
    whole = IntClass.of(size, static=static)
    return whole if static or masks_contiguous else IntClass(wide=whole.wide)


def _edge(contiguous: bool, size: int, block: int) -> str:
    return "mask" if contiguous or block <= SMALL_BLOCK or 2 * size <= block else "clamp"
