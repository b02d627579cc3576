"""Operations built from torch's own calls, correct for every layout, shape and device: the fallback of every call."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch

from ..errors import InvalidProblemError
from ..passes import load, unwatched
from .layout import ALIGNED_BYTES
from .scales import BLOCKS_OF_A, BLOCKS_OF_B, BLOCKS_OF_WEIGHTS, SCALE_BLOCK, Blocks, block_of

Tensor = torch.Tensor
GPU_INT_LEAST_ROWS = 17
GPU_INT_MULTIPLE = 8
"""Limits of torch's ``_int_mm`` on a GPU: more than 16 rows of a, and K and N that are multiples of 8."""
GPU_INT_COLUMN_MULTIPLE = 4
"""Multiple that cuBLASLt requires of int8 leading dimensions, and so of the number of rows of a column-major a."""


def with_usual_strides(x: Tensor) -> Tensor:
    """Return a contiguous x with the strides that its sizes imply.

    A slice such as hidden[:, -1:] has another along its dimension of size 1. If the weight needs no gradient, torch then multiplies
    a batch of matrices, which takes up to 45 times as long on a CPU.
    """
    if x.dim() < 3 or not x.is_contiguous():
        return x
    usual = [math.prod(x.shape[i + 1 :]) for i in range(x.dim())]
    return x if 0 in x.shape or list(x.stride()) == usual else x.as_strided(x.shape, usual)


def packed(weight: Tensor) -> Tensor:
    """Pack 4-bit integers [K, N] into uint8 [K/2, N]: row 2j in the low four bits of row j, row 2j + 1 in the high four."""
    low, high = weight[0::2].to(torch.uint8), weight[1::2].to(torch.uint8)
    return (low & 15) | (high << 4)


def unpacked(b: Tensor, encoding: str) -> Tensor:
    """Unpack b […, K/2, N] to […, K, N]: int8 for ``int4``, uint8 for ``uint4``. Return b itself without an encoding."""
    if not encoding:
        return b
    low, high = b & 15, b >> 4
    # Each dimension stays as near in memory as it is: b is read and written once, in order.
    if b.stride(-2) == 1:
        numbers = torch.stack([low.mT, high.mT], dim=-1).flatten(-2).mT
    else:
        numbers = torch.stack([low, high], dim=-2).flatten(-3, -2)
    return (numbers.to(torch.int8) ^ 8) - 8 if encoding == "int4" else numbers


def over_blocks(scale: Tensor, size: tuple[int, int], legal: Blocks, name: str) -> Tensor:
    """Expand a scale to broadcast to an operand of ``size``. Raises InvalidProblemError if its shape does not fit."""
    block = block_of(tuple(scale.shape), size, legal)
    if block is None:
        raise InvalidProblemError(f"{name}: got shape {list(scale.shape)}, which does not fit an operand of shape {list(size)}")
    if scale.numel() == 1:
        return scale.reshape(())
    for dim in (0, 1):
        if block[dim] > 1 and scale.shape[dim] > 1:
            scale = scale.repeat_interleave(block[dim], dim).narrow(dim, 0, size[dim])
    return scale


def dequantized(
    b: Tensor, scale: Tensor | None, zero: Tensor | None, encoding: str, dtype: torch.dtype, *, legal: Blocks = BLOCKS_OF_WEIGHTS
) -> Tensor:
    """Return (b − zero) · scale, or b alone, as [K, N] of ``dtype``, rounded at each step in the wider dtype as by eager torch."""
    if (
        scale is not None
        and unwatched(b, scale, zero)
        and (made := _in_one_pass(b, scale, zero, encoding, dtype, legal)) is not None
    ):
        return made
    numbers = unpacked(b, encoding)
    if scale is None:
        return numbers.to(dtype)
    wide = torch.promote_types(dtype, scale.dtype)
    wide = wide if zero is None else torch.promote_types(wide, zero.dtype)
    values = numbers.to(wide)
    if zero is not None:
        values = _with_blocks(torch.sub, values, zero.to(wide), legal, "zero_b")
    return _with_blocks(torch.mul, values, scale.to(wide), legal, "scale_b").to(dtype)


def _with_blocks(do: Callable[[Tensor, Tensor], Tensor], values: Tensor, scale: Tensor, legal: Blocks, name: str) -> Tensor:
    """Return ``do(values, scale)`` with each number of the scale for the values of its block."""
    size = (values.shape[0], values.shape[1])
    block = block_of(tuple(scale.shape), size, legal)
    if block is None or scale.dim() < 2 or scale.shape[0] == 1 or block[1] != 1 or size[0] % block[0]:
        return do(values, over_blocks(scale, size, legal, name))
    return do(values.view(scale.shape[0], block[0], size[1]), scale.unsqueeze(1)).flatten(0, 1)  # broadcast: nothing is repeated


def _in_one_pass(b: Tensor, scale: Tensor, zero: Tensor | None, encoding: str, dtype: torch.dtype, legal: Blocks) -> Tensor | None:
    """Return ``dequantized`` by one kernel on a GPU, or None where it does not fit."""
    kernel, size = load("dequantize"), (b.shape[0] * (2 if encoding else 1), b.shape[1])
    blocks = [block_of(tuple(x.shape), size, legal) for x in (scale, scale if zero is None else zero)]
    if blocks[0] is None or blocks[1] is None or not kernel.serves(b, scale, zero, dtype):
        return None
    made: Tensor = kernel.dequantize(b, scale, zero, encoding, dtype, (blocks[0], blocks[1]))
    return made


def int_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of int8 operands as int32.

    ``_int_mm`` has two defects. On a CPU it leaves its result unwritten if the rows of an operand share memory, so such operands
    are copied. On a GPU it limits sizes, and a float64 product replaces it. That product is exact, because sums of int8 products
    stay below 2^53.
    """
    if a.shape[1] == 0:
        return a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.int32)
    multiples = not (a.shape[1] % GPU_INT_MULTIPLE or b.shape[1] % GPU_INT_MULTIPLE)
    if not a.is_cuda or (multiples and a.shape[0] >= GPU_INT_LEAST_ROWS):
        return torch._int_mm(_plain(a), _plain(b))
    return (a.double() @ b.double()).to(torch.int32)


def _plain(x: Tensor) -> Tensor:
    """Return x, or a copy if ``_int_mm`` rejects it: it needs a contiguous matrix or its transpose, single lines included."""
    rows, cols = x.shape
    aligned = not x.is_cuda or x.storage_offset() * x.element_size() % ALIGNED_BYTES == 0
    transposed = x.stride() == (1, rows) and rows > 1 and cols > 1 and not (x.is_cuda and rows % GPU_INT_COLUMN_MULTIPLE)
    if aligned and (x.stride() == (cols, 1) or transposed):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Return (a · scale_a) @ (b · scale_b) of 8-bit floats as float32.

    Without blocks along K, the scales multiply the sums. On CUDA the product then runs in bfloat16, which holds every 8-bit float,
    with float32 sums. With blocks along K, one such product runs for each 128 elements of K. A float32 product is avoided, because
    torch might compute it in tf32.
    """
    (m, k), n = a.shape, b.shape[1]
    if k == 0:
        return torch.zeros((m, n), dtype=torch.float32, device=a.device)
    factor_a, factor_b = over_blocks(scale_a, (m, k), BLOCKS_OF_A, "scale_a"), over_blocks(scale_b, (k, n), BLOCKS_OF_B, "scale_b")
    blocks = any(factor.dim() == 2 and factor.shape[along] > 1 for factor, along in ((factor_a, 1), (factor_b, 0)))
    if not blocks:
        return _wide_product(a, b) * factor_a * factor_b
    if not a.is_cuda:
        return (a.float() * factor_a) @ (b.float() * factor_b)
    return sums_of_blocks(a, b, factor_a, factor_b)


def sums_of_blocks(a: Tensor, b: Tensor, factor_a: Tensor, factor_b: Tensor) -> Tensor:
    """Return (a · factor_a) @ (b · factor_b), summed over slices of SCALE_BLOCK elements of K with constant, broadcast factors."""
    total = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float32, device=a.device)
    for first in range(0, a.shape[1], SCALE_BLOCK):
        length = min(SCALE_BLOCK, a.shape[1] - first)
        part = _wide_product(a.narrow(1, first, length), b.narrow(0, first, length))
        total = total + part * _at(factor_a, 1, first) * _at(factor_b, 0, first)
    return total


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and torch.version.hip is None:
        return torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16), out_dtype=torch.float32)
    return a.float() @ b.float()


def _at(factor: Tensor, dim: int, index: int) -> Tensor:
    """Return the factors at one index along K, which is dimension ``dim``."""
    return factor if factor.dim() == 0 or factor.shape[dim] == 1 else factor.narrow(dim, index, 1)


def added(function: Callable[..., Tensor], a: Tensor, b: Tensor, inp: Tensor, alpha: float, beta: float) -> Tensor:
    """Call torch.addmm or torch.baddbmm with its arguments in the order of an operation."""
    return function(inp, a, b, alpha=alpha, beta=beta)


class _DenseLeaf(torch.autograd.Function):
    """The dense matrix of a sparse_bsr leaf, whose gradient is dense: torch accumulates no sparse_bsr gradients."""

    @staticmethod
    def forward(b: Tensor) -> Tensor:
        return b.to_dense()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (b,) = ctx.saved_tensors
        ones = torch.ones_like(b.values())
        return grads[0] * torch.sparse_bsr_tensor(b.crow_indices(), b.col_indices(), ones, size=b.shape).to_dense()


def _dense(b: Tensor) -> Tensor:
    """Return the dense matrix of a sparse_bsr weight, differentiable."""
    if b.is_leaf and b.requires_grad and torch.is_grad_enabled():
        return _DenseLeaf.apply(b)  # type: ignore[no-any-return,no-untyped-call]
    return b.to_dense()


def block_product(a: Tensor, b: Tensor, sparsity: object = None) -> Tensor:  # noqa: ARG001 - b carries its sparsity
    """Return a @ bᵀ for a sparse_bsr b [N, K] by a dense product: int32 for int8, bfloat16 for 8-bit floats."""
    if a.is_floating_point() and a.element_size() == 1:
        return torch.mm(a.float(), b.to(torch.float32).to_dense().t()).to(torch.bfloat16)
    dense = _dense(b).t()
    return torch.mm(a, dense) if a.is_floating_point() else int_composed(a, dense)


def block_added(a: Tensor, b: Tensor, inp: Tensor, alpha: float, beta: float, sparsity: object = None) -> Tensor:  # noqa: ARG001
    """Return beta · inp + alpha · a @ bᵀ for a sparse_bsr b [N, K] by a dense product."""
    return torch.addmm(inp, a, _dense(b).t(), alpha=alpha, beta=beta)


def two_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Return a @ b + c @ d."""
    return torch.addmm(torch.mm(c, d), a, b)


def int_composed(a: Tensor, b: Tensor) -> Tensor:
    """Compute int_mm. torch's function transforms have no rule for ``_int_mm``, so they get a float64 product."""
    if not torch.compiler.is_compiling() and any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in (a, b)):
        return (a.double() @ b.double()).to(torch.int32)
    return int_product(a, b)


def mixed_composed(a: Tensor, b: Tensor, scale: Tensor | None, zero: Tensor | None, encoding: str = "") -> Tensor:
    """Compute mixed_mm so that autograd can differentiate it."""
    return torch.mm(a, dequantized(b, scale, zero, encoding, a.dtype))


def scaled_composed(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast_accum: bool = False) -> Tensor:  # noqa: ARG001
    """Compute scaled_mm as float32 regardless of autocast. ``fast_accum`` only permits faster sums, and is not used."""
    kind = a.device.type
    with torch.autocast(kind, enabled=False) if kind != "meta" else contextlib.nullcontext():
        return scaled_product(a, b, scale_a, scale_b)
