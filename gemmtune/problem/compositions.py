"""The operations by torch's own calls, right for operands of every layout, shape and device: what calls fall back to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from ..errors import InvalidProblemError
from .layout import ALIGNED_BYTES
from .scales import BLOCKS_OF_A, BLOCKS_OF_B, BLOCKS_OF_WEIGHTS, SCALE_BLOCK, Blocks, block_of

Tensor = torch.Tensor
GPU_INT_LEAST_ROWS = 17
GPU_INT_MULTIPLE = 8
"""torch's ``_int_mm`` on a GPU takes more than 16 rows of a, and K and N that are multiples of 8."""
GPU_INT_COLUMN_MULTIPLE = 4
"""cuBLASLt multiplies int8 only with leading dimensions that are multiples of this: a column-major a needs so many rows."""


def packed(weight: Tensor) -> Tensor:
    """Integers [K, N] of four bits each as uint8 [K/2, N]: row 2j in the low four bits of row j, row 2j + 1 in the high ones."""
    low, high = weight[0::2].to(torch.uint8), weight[1::2].to(torch.uint8)
    return (low & 15) | (high << 4)


def unpacked(b: Tensor, encoding: str) -> Tensor:
    """The numbers [K, N] in a packed b [K/2, N]: int8 for ``int4``, uint8 for ``uint4``; without an encoding b as it is."""
    if not encoding:
        return b
    numbers = torch.stack([b & 15, b >> 4], dim=1).flatten(0, 1)
    return (numbers.to(torch.int8) ^ 8) - 8 if encoding == "int4" else numbers


def over_blocks(scale: Tensor, size: tuple[int, int], legal: Blocks, name: str) -> Tensor:
    """A scale so that it broadcasts to an operand of ``size``: each number repeated along the dimensions of its block.

    Raises:
        InvalidProblemError: its shape is none that an operand of that size can have.
    """
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
    """(b − zero) · scale as a matrix [K, N] of ``dtype``, the dtype of a; b itself in that dtype where there is no scale.

    Computed in the widest of ``dtype`` and the scale's, each step rounded, as eager torch does.
    """
    numbers = unpacked(b, encoding)
    if scale is None:
        return numbers.to(dtype)
    wide = torch.promote_types(dtype, scale.dtype)
    wide = wide if zero is None else torch.promote_types(wide, zero.dtype)
    size = (numbers.shape[0], numbers.shape[1])
    values = numbers.to(wide)
    if zero is not None:
        values = values - over_blocks(zero.to(wide), size, legal, "zero_b")
    return (values * over_blocks(scale.to(wide), size, legal, "scale_b")).to(dtype)


def int_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of int8 as int32.

    torch's ``_int_mm`` where it is right: on a CPU it leaves its result unwritten for operands whose rows share memory, on a GPU it
    has limits of size. Elsewhere a float64 product, exact because sums of int8 products stay below 2^53.
    """
    if a.shape[1] == 0:
        return a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.int32)
    multiples = not (a.shape[1] % GPU_INT_MULTIPLE or b.shape[1] % GPU_INT_MULTIPLE)
    if not a.is_cuda or (multiples and a.shape[0] >= GPU_INT_LEAST_ROWS):
        return torch._int_mm(_plain(a), _plain(b))
    return (a.double() @ b.double()).to(torch.int32)


def _plain(x: Tensor) -> Tensor:
    """x as a contiguous matrix or the transpose of one, as ``_int_mm`` takes it on x's device; a copy if it is not.

    Strides of a single row or column count too.
    """
    rows, cols = x.shape
    aligned = not x.is_cuda or x.storage_offset() * x.element_size() % ALIGNED_BYTES == 0
    transposed = x.stride() == (1, rows) and rows > 1 and cols > 1 and not (x.is_cuda and rows % GPU_INT_COLUMN_MULTIPLE)
    if aligned and (x.stride() == (cols, 1) or transposed):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """(a · scale_a) @ (b · scale_b) of 8-bit floats as float32.

    Without blocks along K the scales multiply the sums. On CUDA the product is then one of bfloat16, which holds every 8-bit float,
    with sums in float32; with blocks it is one such product for each 128 elements of K: a float32 product might be done in tf32.
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
    """(a · factor_a) @ (b · factor_b) as a sum of products of SCALE_BLOCK elements of K, along which no factor changes.

    Factors are 0-D, or as large as their operand but for 1 where they are the same along a dimension.
    """
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
    """The factors at one place along K, which is dimension ``dim``."""
    return factor if factor.dim() == 0 or factor.shape[dim] == 1 else factor.narrow(dim, index, 1)


def added(function: Callable[..., Tensor], a: Tensor, b: Tensor, inp: Tensor, alpha: float, beta: float) -> Tensor:
    """torch.addmm or torch.baddbmm."""
    return function(inp, a, b, alpha=alpha, beta=beta)


def block_product(a: Tensor, b: Tensor, sparsity: object = None) -> Tensor:  # noqa: ARG001 - b says it
    """a @ bᵀ for a sparse_bsr b [N, K], by a dense product; of int8 as int32, of 8-bit floats as bfloat16."""
    if a.is_floating_point() and a.element_size() == 1:
        return torch.mm(a.float(), b.to(torch.float32).to_dense().t()).to(torch.bfloat16)
    dense = b.to_dense().t()
    return torch.mm(a, dense) if a.is_floating_point() else int_composed(a, dense)


def block_added(a: Tensor, b: Tensor, inp: Tensor, alpha: float, beta: float, sparsity: object = None) -> Tensor:  # noqa: ARG001
    """beta · inp + alpha · a @ bᵀ for a sparse_bsr b [N, K], by a dense product."""
    return torch.addmm(inp, a, b.to_dense().t(), alpha=alpha, beta=beta)


def two_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """a @ b + c @ d."""
    return torch.addmm(torch.mm(c, d), a, b)


def int_composed(a: Tensor, b: Tensor) -> Tensor:
    """int_mm. Within torch's function transforms, which have no rule for ``_int_mm``, a float64 product."""
    if not torch.compiler.is_compiling() and any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in (a, b)):
        return (a.double() @ b.double()).to(torch.int32)
    return int_product(a, b)


def mixed_composed(a: Tensor, b: Tensor, scale: Tensor | None, zero: Tensor | None, encoding: str = "") -> Tensor:
    """mixed_mm, differentiable."""
    return torch.mm(a, dequantized(b, scale, zero, encoding, a.dtype))


def scaled_composed(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast_accum: bool = False) -> Tensor:  # noqa: ARG001
    """scaled_mm as float32, whatever autocast says. A permission for fast sums is not made use of."""
    kind = a.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext():
        return scaled_product(a, b, scale_a, scale_b)
