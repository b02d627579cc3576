"""What torch's operations promise of their arithmetic, for the flags that the problem recorded."""

from __future__ import annotations

import dataclasses

import torch

from ...choice import Claims
from ...device import DeviceInfo
from ...problem import Problem
from ...problem.dtypes import accumulator_dtype
from .dense import gemm_dtype

__all__ = ["composed_scaled_claims", "dense_claims", "int_claims", "mixed_claims", "scaled_claims", "sum_claims"]

_MAX_SPLITS = 16
_SLICE_K = 64
"""How cuBLAS may have split K, which it does not tell: into at most 16 slices of at least 64."""
_FLOAT32_BITS = 24


def sum_claims(problem: Problem, device: DeviceInfo) -> Claims:
    """Claims of c @ d, rounded to the dtype of the products, with a @ b added: two partial sums, or those of either product."""
    claims, dtype = dense_claims(problem, device), gemm_dtype(problem)
    splits = 2 if claims.partials != dtype else sum(_splits(k, device) for k in problem.summed)
    return dataclasses.replace(claims, partials=dtype, splits=splits)


def mixed_claims(problem: Problem, device: DeviceInfo) -> Claims:
    """b is brought to the dtype of a, exactly without a scale, else with a rounding of each weight."""
    return dense_claims(problem, device, weights=None if problem.scale_b is None else problem.dtype)


def int_claims(problem: Problem) -> Claims:
    """Exact sums, which an epilogue gets as float32."""
    before = torch.int32 if problem.epilogue is None else torch.float32
    return Claims(accumulate=torch.int32, partials=torch.int32, epilogue_input=before)


def scaled_claims(problem: Problem, device: DeviceInfo, *, fused: bool) -> Claims:
    """Claims of ``_scaled_mm``: an epilogue that is not fused gets its result, rounded to the dtype of out."""
    before = torch.float32 if problem.epilogue is None or fused else problem.out.dtype
    return Claims(accumulate=torch.float32, partials=torch.float32, epilogue_input=before, splits=_splits(problem.k, device))


def composed_scaled_claims(problem: Problem, device: DeviceInfo) -> Claims:
    """Claims of products of wider floats, with sums and epilogue in float32."""
    return Claims(
        accumulate=torch.float32,
        partials=torch.float32,
        epilogue_input=torch.float32,
        splits=_splits(problem.k, device),
        accumulator_bits=_FLOAT32_BITS,
    )


def dense_claims(problem: Problem, device: DeviceInfo, *, weights: torch.dtype | None = None) -> Claims:
    """Claims of a product in ``gemm_dtype``; see ``_flushes_subnormals`` for where torch promises less than the flags say."""
    dtype, accumulate = gemm_dtype(problem), accumulator_dtype(gemm_dtype(problem))
    reduced = problem.precision.reduced_partials and dtype == problem.dtype
    tf32 = dtype == problem.dtype and problem.precision.input_mode == "tf32"
    return Claims(
        accumulate=accumulate,
        partials=dtype if reduced else accumulate,
        epilogue_input=accumulate if problem.epilogue is None else dtype,
        splits=_splits(problem.k, device),
        weights=weights,
        input_mode="tf32" if tf32 else "ieee",
        flush_subnormals=tf32 or _flushes_subnormals(dtype, device),
    )


def _splits(k: int, device: DeviceInfo) -> int:
    return max(1, min(_MAX_SPLITS, k // _SLICE_K)) if device.type != "cpu" else 1


def _flushes_subnormals(dtype: torch.dtype, device: DeviceInfo) -> bool:
    """Whether subnormal inputs and results may become zero.

    The CPU instructions that multiply bfloat16 do so whatever the control register says (Intel SDM, VDPBF16PS and TDPBF16PS); so do
    the 16-bit matrix instructions of some AMD GPUs (PyTorch notes, "Numerical accuracy", on MI200).
    """
    if device.type == "cpu":
        return dtype == torch.bfloat16 and not {"avx512_bf16", "amx_bf16"}.isdisjoint(device.isa)
    return device.type == "hip" and dtype in (torch.float16, torch.bfloat16)
