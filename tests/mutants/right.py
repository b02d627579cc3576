"""Right but unusual GEMMs: other orders of summation, other declared precisions, other ways of accessing memory.

Strassen's and Winograd's products are not among them. Norms of a and b bound their error, but |a| @ |b| does not bound that of
each element, as the suite requires. They fail if rows differ much in size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from gemmtune.numerics.quantized import numbers
from gemmtune.problem.operations import Encoding

from .gemm import ALL_OPS, DENSE, INT8, MIXED, SCALED, Gemm, Weights, spread, unpacked
from .products import (
    backwards,
    blockwise,
    column_by_column,
    compensated,
    in_float64,
    one_by_one,
    pairwise,
    rounding_blocks,
    shuffled,
    split_k,
    tensor_core,
    tf32,
    to_tf32,
)

__all__ = [
    "as_float64",
    "bfloat16_accumulation_declared",
    "bfloat16_partials_declared",
    "blocks_of_4",
    "blocks_of_8",
    "blocks_of_16",
    "columns",
    "each_row_by_itself",
    "float16_accumulation_declared",
    "float16_partials_declared",
    "kahan",
    "last_to_first",
    "no_odd_k",
    "offset_to_unsigned",
    "one_after_another",
    "packed",
    "padded",
    "plain",
    "random_order",
    "split_in_2",
    "split_in_3",
    "split_in_7",
    "sums_of_blocks_scaled",
    "tf32_cut_off",
    "tf32_rounded",
    "transposed_result",
    "tree",
    "truncating_accumulator",
    "weights_rounded",
    "zeros_skipped_as_declared",
    "zeros_taken_from_sums",
]

TILE = 16
FLOAT32_ONLY = ("float32",)


def _narrow(dtype: str, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], **declared: Mapping[str, str] | int) -> Gemm:
    return Gemm(gemm_traits=DENSE.changed({"dtypes": (dtype,), **declared}), product=product)


plain = Gemm(gemm_traits=ALL_OPS)
split_in_2 = Gemm(gemm_traits=DENSE.changed({"splits": 2}), product=split_k(splits=2))
split_in_3 = Gemm(gemm_traits=DENSE.changed({"splits": 3}), product=split_k(splits=3))
split_in_7 = Gemm(gemm_traits=DENSE.changed({"splits": 7}), product=split_k(splits=7))
last_to_first = Gemm(product=backwards)
random_order = Gemm(product=shuffled)
one_after_another = Gemm(product=one_by_one)
each_row_by_itself = Gemm(gemm_traits=DENSE.changed({"batch_invariant": True}), product=one_by_one)
tree = Gemm(product=pairwise)
blocks_of_4 = Gemm(product=blockwise(4))
blocks_of_8 = Gemm(product=blockwise(8))
blocks_of_16 = Gemm(product=blockwise(16))
kahan = Gemm(product=compensated)
columns = Gemm(product=column_by_column)
as_float64 = Gemm(product=in_float64)
"""Sums in float64 that are rounded once, to the dtype of the result."""
truncating_accumulator = Gemm(gemm_traits=DENSE.changed({"dtypes": ("float16", "bfloat16")}), product=tensor_core(25))
"""Sums of a tensor core: it truncates 32 products and the running sum to the last place of the largest one, without rounding."""

float16_accumulation_declared = _narrow("float16", rounding_blocks(torch.float16), accumulate={"float16": "float16"})
bfloat16_accumulation_declared = _narrow("bfloat16", rounding_blocks(torch.bfloat16), accumulate={"bfloat16": "bfloat16"})
float16_partials_declared = _narrow("float16", split_k(torch.float16, 4), partials={"float16": "float16"}, splits=4)
bfloat16_partials_declared = _narrow("bfloat16", split_k(torch.bfloat16, 4), partials={"bfloat16": "bfloat16"}, splits=4)
tf32_cut_off = Gemm(gemm_traits=DENSE.changed({"dtypes": FLOAT32_ONLY, "input_mode": "tf32"}), product=tf32)


def _rounded_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest tf32 number, by adding half of the last kept place. NaN and infinities do not change."""
    half = (x.contiguous().view(torch.int32) + 2**12).view(torch.float32)
    return torch.where(x.isfinite(), to_tf32(half), x)


tf32_rounded = Gemm(
    gemm_traits=DENSE.changed({"dtypes": FLOAT32_ONLY, "input_mode": "tf32"}),
    product=lambda a, b: _rounded_to_tf32(a) @ _rounded_to_tf32(b),
)


def _padded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of operands padded with zeros to multiples of the tile, in new buffers, without the padding."""
    m, k, n = *a.shape[-2:], b.shape[-1]
    up = [-size % TILE for size in (m, n, k)]
    wide_a = torch.nn.functional.pad(a, (0, up[2], 0, up[0]))
    wide_b = torch.nn.functional.pad(b, (0, up[1], 0, up[2]))
    return (wide_a @ wide_b)[..., :m, :n]


def _packed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product with b copied to consecutive panels of TILE columns."""
    panels = [b[..., j : j + TILE].contiguous() for j in range(0, max(b.shape[-1], 1), TILE)]
    return torch.cat([a @ panel for panel in panels], dim=-1)


padded = Gemm(product=_padded)
packed = Gemm(product=_packed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransposedResult(Gemm):
    """A GEMM that computes bᵀ @ aᵀ into new memory and returns the transposed view, a right result in column-major order."""

    def _run(self, a: torch.Tensor, b: torch.Tensor, **others: object) -> torch.Tensor:
        result = Gemm._run(self, a, b, **others)  # type: ignore[arg-type]
        return result if others.get("out") is not None else result.mT.contiguous().mT


transposed_result = TransposedResult()


def _even_k(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if a.shape[-1] % 2:
        raise NotImplementedError(f"K: got {a.shape[-1]}, expected an even number")
    return a, b


no_odd_k = Gemm(gemm_traits=DENSE.changed({"multiples": (1, 1, 2)}), read=_even_k)
"""An odd K is declared as unsupported, and refused."""


def _without_zeros(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product without rows of zeros and without those elements of K for which all of a is zero."""
    kept = a.ne(0).any(-2)
    kept = kept.any(0) if kept.dim() > 1 else kept
    return torch.where((a == 0).all(-1, keepdim=True), 0.0, a[..., kept] @ b[..., kept, :])


zeros_skipped_as_declared = Gemm(gemm_traits=DENSE.changed({"skips_zeros": True}), product=_without_zeros)


def _rounded(weights: Weights) -> torch.Tensor:
    """Return the weights, rounded to the dtype of a after the subtraction and again after the multiplication."""
    if weights.scale is None:
        return unpacked(weights)
    plain = unpacked(dataclasses.replace(weights, scale=None)).to(weights.dtype).float()
    return (plain * spread(weights.scale.float(), weights.size)).to(weights.dtype)


weights_rounded = Gemm(gemm_traits=MIXED, unpack=_rounded)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZerosFromSums(Gemm):
    """A GEMM that computes a @ (b · scale) − a @ (zero · scale), so that zero points meet only sums of a."""

    def mixed_mm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        scale_b: torch.Tensor | None = None,
        zero_b: torch.Tensor | None = None,
        encoding: Encoding = "",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute like ``Gemm.mixed_mm``."""
        size = a.shape[-1], b.shape[-1]
        scale = torch.ones(()) if scale_b is None else scale_b.float()
        result = a.float() @ (numbers(b, encoding).float() * spread(scale, size))
        if zero_b is not None:
            result = result - a.float() @ (spread(zero_b.float(), size) * spread(scale, size)).expand(size)
        return result.to(a.dtype) if out is None else out.copy_(result)


zeros_taken_from_sums = ZerosFromSums(gemm_traits=MIXED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SumsOfBlocksScaled(Gemm):
    """A GEMM that sums 128 elements of K at a time and multiplies each sum by its scales before adding it."""

    def scaled_mm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        out_dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute like ``Gemm.scaled_mm``."""
        (m, k), n = a.shape, b.shape[-1]
        first, second = spread(scale_a, (m, k)).expand(m, k), spread(scale_b, (k, n)).expand(k, n)
        acc = torch.zeros(m, n)
        for i in range(0, k, 128):
            part = a[:, i : i + 128].float() @ b[i : i + 128].float()
            acc += part * first[:, i : i + 1] * second[i : i + 1]
        return acc.to(out_dtype) if out is None else out.copy_(acc)


sums_of_blocks_scaled = SumsOfBlocksScaled(gemm_traits=SCALED)


def _as_unsigned_with_correction(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product from a + 128, unsigned as some instructions need it, minus 128 times the sums of b."""
    return (a + 128) @ b - 128 * b.sum(-2, keepdim=True)


offset_to_unsigned = Gemm(gemm_traits=INT8, product=_as_unsigned_with_correction)
