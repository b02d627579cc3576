"""What a Triton kernel is compiled for: classes of layouts rather than layouts, so that one kernel serves many shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...problem import Epilogue, Layout, Problem
from ...problem.dtypes import FLOAT8
from ...problem.problem import ScalarClass
from .classes import IntClass, OperandClass, divisor, strides_of
from .configs import Config
from .quantized import Quantized, quantized_of

__all__ = ["Edge", "IntClass", "KernelSpec", "OperandClass", "divisor", "specialise", "strides_of"]

SMALL_BLOCK = 16
"""Tiles of so few rows are for problems of so few rows: masked always, so that M = 1 and M = 16 share a kernel."""


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
    dependent: bool
    """The kernel waits for the one before it by itself, so that it may be launched before that one ends."""
    interpret: bool
    quantized: Quantized | None = None
    """What is special where the operands are no floats of one dtype."""
    c: OperandClass | None = None
    d: OperandClass | None = None
    k2: IntClass | None = None
    even_k2: bool = True


def specialise(
    problem: Problem,
    config: Config,
    *,
    static: bool = False,
    interpret: bool = False,
    dependent: bool = False,
    capability: int = 0,
) -> KernelSpec:
    """The kernel that serves ``problem`` with ``config``.

    With ``static``, sizes and strides are constants of the kernel; else they are arguments, of which the kernel knows whether they
    are 0 or 1, by which power of two they divide, and whether they need 64 bits. ``capability`` is that of a CUDA device, else 0.
    """
    quantized = quantized_of(problem, config.block_k, capability=capability, static=static)
    a, b = _inputs(problem, quantized, static=static)
    c, d = _second(problem, static=static)
    out, inp, extra = _epilogue_side(problem, static=static)
    return KernelSpec(
        **_sizes(problem, config, ((a, b), (c, d)), (out, inp, *extra), static=static),
        a=a,
        b=b,
        out=out,
        inp=inp,
        extra=extra,
        batched=problem.batch > 1,
        alpha=problem.alpha,
        beta=problem.beta if inp else "zero",
        epilogue=Epilogue(nodes=problem.epilogue.nodes) if problem.epilogue else None,
        input_precision=problem.precision.input_mode,
        accumulator=problem.accumulator,
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        stages=config.stages,
        warps=config.warps,
        split=config.split_k > 1,
        dependent=dependent,
        interpret=interpret,
        quantized=quantized,
        c=c,
        d=d,
    )


Operands = Sequence[OperandClass | None]


def _sizes(problem: Problem, config: Config, products: Sequence[Operands], after: Operands, *, static: bool) -> dict[str, Any]:
    """The fields of a spec about sizes: what is known of each, and whether blocks at its end are partial."""
    lefts, rights = ([x for x in side if x is not None] for side in zip(*products, strict=True))
    along_m, along_n = (any(x.contiguous_dim == dim for x in side) for dim, side in ((1, lefts), (2, rights)))
    after_m, after_n = (any(x is not None and x.contiguous_dim == dim for x in after) for dim in (1, 2))
    sums = [_depth_class(k, config, pair, static=static) for k, pair in zip((problem.k, problem.k2), products, strict=True)]
    return {
        "m": _size_class(problem.m, static, along_m or after_m),
        "n": _size_class(problem.n, static, along_n or after_n),
        "k": sums[0],
        "k2": sums[1],
        "even_k": problem.k % config.block_k == 0,
        "even_k2": problem.k2 % config.block_k == 0,
        "edge": Edge(m=_edge(along_m, problem.m, config.block_m), n=_edge(along_n, problem.n, config.block_n)),
    }


def _depth_class(k: int, config: Config, operands: Operands, *, static: bool) -> IntClass | None:
    """The class of a summed dimension, in which a partial block is masked; None without operands."""
    left, right = operands
    if left is None or right is None:
        return None
    along_k = left.contiguous_dim == 2 or right.contiguous_dim == 1
    return _size_class(k, static, k % config.block_k != 0 and along_k)


def _inputs(problem: Problem, quantized: Quantized | None, *, static: bool) -> tuple[OperandClass, OperandClass]:
    a = OperandClass.of(problem.a, (problem.batch, problem.m, problem.k), static=static)
    b = OperandClass.of(problem.b, (problem.batch, problem.b.size[-2], problem.n), static=static)
    if quantized is not None and quantized.by_bits:
        a, b = (replace(x, dtype=torch.uint8) if x.dtype in FLOAT8 else x for x in (a, b))
    return a, b


def _second(problem: Problem, *, static: bool) -> tuple[OperandClass, OperandClass] | tuple[None, None]:
    """c and d of a sum of two products."""
    if problem.c is None or problem.d is None:
        return None, None
    return (
        OperandClass.of(problem.c, (1, problem.m, problem.k2), static=static),
        OperandClass.of(problem.d, (1, problem.k2, problem.n), static=static),
    )


def _epilogue_side(problem: Problem, *, static: bool) -> tuple[OperandClass, OperandClass | None, tuple[OperandClass, ...]]:
    """out, inp if it is read, and the epilogue's operands."""
    shape = (problem.batch, problem.m, problem.n)

    def added(layout: Layout) -> OperandClass:
        return OperandClass.of(layout, shape, static=static, broadcast=True)

    inp = added(problem.inp_read) if problem.inp_read is not None else None
    operands = problem.epilogue.operands if problem.epilogue else ()
    return OperandClass.of(problem.out, shape, static=static), inp, tuple(map(added, operands))


def _size_class(size: int, static: bool, masks_contiguous: bool) -> IntClass:
    """A divisor only helps where the size bounds the contiguous dimension of a masked access; elsewhere it would split kernels."""
    whole = IntClass.of(size, static=static)
    return whole if static or masks_contiguous else IntClass(wide=whole.wide)


def _edge(contiguous: bool, size: int, block: int) -> str:
    return "mask" if contiguous or block <= SMALL_BLOCK or 2 * size <= block else "clamp"
