"""torch's precision flags, as they apply to one GEMM."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

InputMode = Literal["ieee", "tf32"]
"""The precision of the inputs: unchanged, or float32 rounded to the 11 significand bits of tf32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The shortcuts that a kernel may take for speed.

    ``input_mode`` is tf32 if torch's float32 matmul precision allows it (CUDA and float32 only). ``reduced_partials`` is torch's
    ``allow_fp16_reduced_precision_reduction`` or its bf16 twin: a split-K kernel may store partial sums in the output dtype.
    """

    input_mode: InputMode = "ieee"
    reduced_partials: bool = False


def precision_of(dtype: torch.dtype, device_type: str) -> Precision:
    """Return the flags in force now for a GEMM of ``dtype``. Other device types and dtypes get the strictest flags."""
    if device_type != "cuda":
        return Precision()
    matmul = torch.backends.cuda.matmul
    if dtype == torch.float32:
        # Not ``allow_tf32``: reading the older flag raises once a program has set the newer one.
        return Precision(input_mode="tf32" if matmul.fp32_precision == "tf32" else "ieee")
    if dtype == torch.float16:
        return Precision(reduced_partials=_first(matmul.allow_fp16_reduced_precision_reduction))
    if dtype == torch.bfloat16:
        return Precision(reduced_partials=_first(matmul.allow_bf16_reduced_precision_reduction))
    return Precision()


def flags_token(dtype: torch.dtype) -> object:
    """Return a hashable value that changes whenever ``precision_of`` may change. It is cheap enough for every call."""
    getter = _FLAG_GETTERS.get(dtype)
    return getter() if getter else None


_FLAG_GETTERS: dict[torch.dtype, Callable[[], object]] = {
    torch.float32: functools.partial(torch._C._get_fp32_precision_getter, "cuda", "matmul"),
    torch.float16: torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch.bfloat16: torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
}
"""The getters behind torch's public properties. Calling them directly takes 60 ns instead of 1 µs."""


def _first(flag: bool | tuple[bool, ...]) -> bool:
    """Return the flag alone: newer versions of torch pair it with a flag that permits split-K."""
    return bool(flag[0] if isinstance(flag, tuple) else flag)
