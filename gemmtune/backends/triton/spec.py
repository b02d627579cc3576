"""What a Triton kernel is compiled for: classes of layouts rather than layouts, so that one kernel serves many shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...problem import Epilogue, Problem
from ...problem.dtypes import FLOAT8
from ...problem.problem import ScalarClass
from .classes import IntClass, OperandClass, shaped
from .configs import Config
from .quantized import Quantized, quantized_of

SMALL_BLOCK = 16
"""Tiles of so few rows are for problems of so few rows: masked always, so that M = 1 and M = 16 share a kernel."""
ASYNC_BYTES = 4
"""The narrowest copy that can go to shared memory without passing through registers (cp.async, PTX ISA)."""


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
    problem: Problem, config: Config, *, interpret: bool = False, dependent: bool = False, capability: int = 0
) -> KernelSpec:
    """The kernel that serves ``problem`` with ``config``.

    Sizes and strides are arguments, of which the kernel knows whether they are 0 or 1, by which power of two they divide, and
    whether they need 64 bits. ``capability`` is that of a CUDA device, else 0.
    """
    quantized = quantized_of(problem, config.block_k, capability=capability)
    classes = _classes(problem, quantized)
    lefts = [classes[name] for name in ("a", "c") if name in classes]
    rights = [classes[name] for name in ("b", "d") if name in classes]
    after = [operand for name, operand in classes.items() if name not in ("a", "b", "c", "d")]
    along_m, along_n = any(x.contiguous_dim == 1 for x in lefts), any(x.contiguous_dim == 2 for x in rights)
    # A partial block of a summed dimension is masked.
    sums = [
        _size(k, masks=k % config.block_k != 0 and (left.contiguous_dim == 2 or right.contiguous_dim == 1))
        for k, left, right in zip(problem.summed, lefts, rights, strict=True)
    ]
    taken = ("block_m", "block_n", "block_k", "stages", "warps")
    same: dict[str, Any] = {name: getattr(config, name) for name in taken}
    same |= {name: classes.get(name) for name in ("a", "b", "c", "d", "inp", "out")}
    return KernelSpec(
        extra=tuple(operand for name, operand in classes.items() if name.startswith("x")),
        m=_size(problem.m, masks=along_m or any(x.contiguous_dim == 1 for x in after)),
        n=_size(problem.n, masks=along_n or any(x.contiguous_dim == 2 for x in after)),
        k=sums[0],
        batched=problem.batch > 1,
        even_k=problem.k % config.block_k == 0,
        edge=Edge(m=_edge(along_m, problem.m, config.block_m), n=_edge(along_n, problem.n, config.block_n)),
        alpha=problem.alpha,
        beta=problem.beta if "inp" in classes else "zero",
        epilogue=Epilogue(nodes=problem.epilogue.nodes) if problem.epilogue else None,
        input_precision=problem.precision.input_mode,
        accumulator=problem.accumulator,
        split=config.split_k > 1,
        dependent=dependent,
        interpret=interpret,
        quantized=quantized,
        k2=sums[1] if "c" in classes else None,
        even_k2=problem.k2 % config.block_k == 0,
        **same,
    )


def _classes(problem: Problem, quantized: Quantized | None) -> dict[str, OperandClass]:
    """The class of every matrix that is read or written, by name."""
    by_bits = quantized is not None and quantized.by_bits
    classes: dict[str, OperandClass] = {}
    for name, (layout, shape) in shaped(problem).items():
        if name != "inp" or problem.inp_read is not None:
            operand = OperandClass.of(layout, shape, broadcast=name == "inp" or name.startswith("x"))
            bits = by_bits and name in ("a", "b") and operand.dtype in FLOAT8
            classes[name] = replace(operand, dtype=torch.uint8) if bits else operand
    return classes


def _size(value: int, *, masks: bool) -> IntClass:
    """A divisor helps where the size bounds the contiguous dimension of a masked access; elsewhere it would split kernels."""
    whole = IntClass.of(value)
    return whole if masks else IntClass(wide=whole.wide)


def _edge(contiguous: bool, size: int, block: int) -> str:
    return "mask" if contiguous or block <= SMALL_BLOCK or 2 * size <= block else "clamp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """How an operand reaches shared memory: by accesses of ``width`` bytes, past the registers or through them."""

    width: int
    asynchronous: bool


def staging_of(spec: KernelSpec, *, async_copy: bool, always: bool) -> tuple[Staging, Staging]:
    """How a and b are staged. ``async_copy``: wide enough accesses need no registers; ``always``: accesses of any width do not."""
    # The alignment, in elements, of the mask along a contiguous dimension; 16 where there is no mask.
    along_k = 16 if spec.even_k else spec.k.alignment
    widths = (
        spec.a.vector_bytes(along_k if spec.a.contiguous_dim == 2 else spec.m.alignment),
        spec.b.vector_bytes(along_k if spec.b.contiguous_dim == 1 else spec.n.alignment),
    )
    a, b = (Staging(width=width, asynchronous=always or (async_copy and width >= ASYNC_BYTES)) for width in widths)
    return a, b
