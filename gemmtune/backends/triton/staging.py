"""How the operands of a kernel reach shared memory: by how wide accesses, and past the registers or through them."""

from __future__ import annotations

from dataclasses import dataclass

from .spec import KernelSpec, OperandClass, divisor

__all__ = ["Staging", "staging_of", "vector_bytes"]

ASYNC_BYTES = 4
"""The narrowest copy that can go to shared memory without passing through registers (cp.async, PTX ISA)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """How an operand reaches shared memory: by accesses of ``width`` bytes, past the registers or through them."""

    width: int
    asynchronous: bool


def staging_of(spec: KernelSpec, *, async_copy: bool, always: bool) -> tuple[Staging, Staging]:
    """That of a and b. ``async_copy``: wide enough accesses need no registers; ``always``: accesses of any width do not."""
    mask_a, mask_b = _mask_divisors(spec)
    widths = (vector_bytes(spec.a, mask_divisor=mask_a), vector_bytes(spec.b, mask_divisor=mask_b))
    a, b = (Staging(width=width, asynchronous=always or (async_copy and width >= ASYNC_BYTES)) for width in widths)
    return a, b


def vector_bytes(operand: OperandClass, *, mask_divisor: int) -> int:
    """The widest access in bytes that addresses and mask along an operand's contiguous dimension allow, at least one element."""
    itemsize = operand.dtype.itemsize
    dim = operand.contiguous_dim
    if dim is None:
        return itemsize
    bounds = [operand.pointer_divisor, mask_divisor * itemsize]
    for i, stride in enumerate(operand.strides):
        if i != dim:
            bounds.append((divisor(stride.constant) if stride.constant is not None else stride.divisor) * itemsize)
    return max(min(bounds), itemsize)


def _mask_divisors(spec: KernelSpec) -> tuple[int, int]:
    """The alignments, in elements, of the masks of a and b along their contiguous dimensions; 16 where there is no mask."""
    k = 16 if spec.even_k else divisor(spec.k.constant) if spec.k.constant is not None else spec.k.divisor
    m = divisor(spec.m.constant) if spec.m.constant is not None else spec.m.divisor
    n = divisor(spec.n.constant) if spec.n.constant is not None else spec.n.divisor
    return (k if spec.a.contiguous_dim == 2 else m, k if spec.b.contiguous_dim == 1 else n)
