"""The epilogues that operations bring along: a factor of int_mm_mul, a bias of scaled_mm."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import InvalidProblemError
from ..problem import Epilogue
from ..problem.dtypes import dtype_name
from ..problem.trace import trace

__all__ = ["BiasThen", "add_bias", "bias_epilogue", "factor_dtype", "factor_epilogue", "multiply"]

FACTOR_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def multiply(acc: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The epilogue of int_mm_mul."""
    return acc * scale


def add_bias(acc: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The epilogue of scaled_mm with a bias."""
    return acc + bias


class BiasThen:
    """The epilogue of scaled_mm with a bias and a function of the caller's."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function = function

    def __call__(self, acc: torch.Tensor, bias: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        return self._function(acc + bias, *args)


def factor_dtype(scale: torch.dtype) -> torch.dtype:
    """The dtype of int_mm_mul's result unless the caller names one: what torch promotes int32 and the factor to.

    Raises:
        InvalidProblemError: a factor of another dtype than float32, float16 or bfloat16.
    """
    if scale not in FACTOR_DTYPES:
        expected = ", ".join(map(dtype_name, FACTOR_DTYPES))
        raise InvalidProblemError(f"int_mm_mul: dtype of scale: got {scale}, expected one of {expected}; cast it first")
    return torch.promote_types(scale, torch.int32)


def factor_epilogue(shape: tuple[int, ...], dtype: torch.dtype) -> Epilogue:
    """The epilogue of int_mm_mul as a call with a contiguous factor has it."""
    return trace(multiply, torch.float32, [torch.empty(shape, dtype=dtype, device="meta")])


def bias_epilogue(shape: tuple[int, ...], dtype: torch.dtype) -> Epilogue:
    """The epilogue of scaled_mm with a contiguous bias."""
    return trace(add_bias, torch.float32, [torch.empty(shape, dtype=dtype, device="meta")])
