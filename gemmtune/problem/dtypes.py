"""Facts about the dtypes that a GEMM can have: names, sizes, rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import InvalidProblemError

__all__ = ["DTYPES", "DTypeInfo", "accumulator_dtype", "dtype_info", "dtype_name", "parse_dtype"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DTypeInfo:
    """What is known of one dtype.

    ``unit_roundoff`` is u = 2^-(significand bits), the largest relative error of one rounding to nearest; 0 for integers.
    ``smallest_subnormal`` and ``smallest_normal`` are the smallest positive values with and without gradual underflow.
    """

    dtype: torch.dtype
    short: str
    itemsize: int
    unit_roundoff: float
    smallest_subnormal: float
    smallest_normal: float
    exact_integer: int
    """Every integer up to this magnitude is a value of the dtype."""

    @property
    def name(self) -> str:
        """torch's name, such as ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")


def _float(dtype: torch.dtype, short: str, significand_bits: int, least_exponent: int) -> DTypeInfo:
    return DTypeInfo(
        dtype=dtype,
        short=short,
        itemsize=dtype.itemsize,
        unit_roundoff=2.0**-significand_bits,
        smallest_subnormal=2.0 ** (least_exponent - significand_bits + 1),
        smallest_normal=2.0**least_exponent,
        exact_integer=2**significand_bits,
    )


DTYPES: dict[torch.dtype, DTypeInfo] = {
    info.dtype: info
    for info in (
        _float(torch.float64, "f64", 53, -1022),
        _float(torch.float32, "f32", 24, -126),
        _float(torch.float16, "f16", 11, -14),
        _float(torch.bfloat16, "bf16", 8, -126),
    )
}
"""The dtypes that the dense operations take."""

_ALIASES = {
    "fp64": "float64", "double": "float64", "f64": "float64",
    "fp32": "float32", "float": "float32", "f32": "float32",
    "fp16": "float16", "half": "float16", "f16": "float16",
    "bf16": "bfloat16",
}  # fmt: skip


def dtype_info(dtype: torch.dtype) -> DTypeInfo:
    """The facts about ``dtype``. Raises InvalidProblemError for one that no dense operation takes."""
    try:
        return DTYPES[dtype]
    except KeyError:
        raise InvalidProblemError(f"dtype: got {dtype}, expected one of {', '.join(i.name for i in DTYPES.values())}") from None


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without the prefix: ``float32``."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as ``bfloat16`` or ``bf16``. Raises InvalidProblemError for an unknown one."""
    full = _ALIASES.get(name.lower(), name.lower())
    for dtype, info in DTYPES.items():
        if info.name == full:
            return dtype
    raise InvalidProblemError(
        f"dtype: got {name!r}, expected one of {', '.join(i.name for i in DTYPES.values())}, or tf32 for float32 in tf32 precision"
    )


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which products of ``dtype`` are summed: float64 for float64, float32 for the narrower floats."""
    return torch.float64 if dtype == torch.float64 else torch.float32
