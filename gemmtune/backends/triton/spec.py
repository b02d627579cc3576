"""Specification of a Triton kernel. It holds layout classes instead of layouts, so that one kernel serves many shapes."""

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
"""Maximum tile rows (or columns) that are always masked, so that M = 1 and M = 16 share a kernel."""
ASYNC_BYTES = 4
"""Narrowest copy to shared memory that bypasses registers (cp.async, PTX ISA)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Read mode of a tile that hangs over the edge of M or N: ``mask`` reads zeros, ``clamp`` the last row or column again.

    Clamping is free in the loop, but breaks up the contiguous dimension and rereads a row for most of a far tile.
    """

    m: str
    n: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """Everything that the source of a kernel depends on. Equal specs share one compilation."""

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
    """Graph of the epilogue. The layout classes of its operands are in ``extra``."""
    input_precision: str
    accumulator: torch.dtype
    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    split: bool
    dependent: bool
    """The kernel itself waits for the previous kernel, so that its launch may overlap that kernel's end."""
    interpret: bool
    quantized: Quantized | None = None
    """Extra facts for operands that are not floats of a single dtype."""
    c: OperandClass | None = None
    d: OperandClass | None = None
    k2: IntClass | None = None
    even_k2: bool = True


def specialise(
    problem: Problem, config: Config, *, interpret: bool = False, dependent: bool = False, capability: int = 0
) -> KernelSpec:
    """Return the spec of the kernel that serves ``problem`` with ``config``; ``capability`` is a CUDA device's, else 0.

    Sizes and strides become arguments, of which the kernel knows 0 or 1, power-of-two divisors, and a need of 64 bits.
    """
    quantized = quantized_of(problem, config.block_k, capability=capability)
    classes = _classes(problem, quantized)
    lefts = [classes[name] for name in ("a", "c") if name in classes]
    rights = [classes[name] for name in ("b", "d") if name in classes]
    after = [operand for name, operand in classes.items() if name not in ("a", "b", "c", "d")]
    along_m, along_n = any(x.contiguous_dim == 1 for x in lefts), any(x.contiguous_dim == 2 for x in rights)
    # Mask a partial last block of K.
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
    """Return the class of every matrix that the kernel reads or writes, by name."""
    by_bits = quantized is not None and quantized.by_bits
    classes: dict[str, OperandClass] = {}
    for name, (layout, shape) in shaped(problem).items():
        if name != "inp" or problem.inp_read is not None:
            operand = OperandClass.of(layout, shape, broadcast=name == "inp" or name.startswith("x"))
            bits = by_bits and name in ("a", "b") and operand.dtype in FLOAT8
            classes[name] = replace(operand, dtype=torch.uint8) if bits else operand
    return classes


def _size(value: int, *, masks: bool) -> IntClass:
    """Return the class of a size, with its divisor only where masked accesses use it: elsewhere it would multiply kernels."""
    whole = IntClass.of(value)
    return whole if masks else IntClass(wide=whole.wide)


def _edge(contiguous: bool, size: int, block: int) -> str:
    return "mask" if contiguous or block <= SMALL_BLOCK or 2 * size <= block else "clamp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Path of an operand to shared memory: accesses of ``width`` bytes, asynchronous or through registers."""

    width: int
    asynchronous: bool


def staging_of(spec: KernelSpec, *, async_copy: bool, always: bool) -> tuple[Staging, Staging]:
    """Return how a and b reach shared memory: with ``async_copy`` past registers, from ``ASYNC_BYTES`` or ``always``."""
    # Alignment, in elements, of the mask along a contiguous dimension; 16 without a mask.
    along_k = 16 if spec.even_k else spec.k.alignment
    widths = (
        spec.a.vector_bytes(along_k if spec.a.contiguous_dim == 2 else spec.m.alignment),
        spec.b.vector_bytes(along_k if spec.b.contiguous_dim == 1 else spec.n.alignment),
    )
    a, b = (Staging(width=width, asynchronous=always or (async_copy and width >= ASYNC_BYTES)) for width in widths)
    return a, b
