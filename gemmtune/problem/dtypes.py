"""Facts about the dtypes of a GEMM: names, sizes, rounding."""

from dataclasses import dataclass

import torch

from ..errors import InvalidProblemError
from ..operand_kinds import full_dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class DTypeInfo:
    """Numeric facts about one dtype.

    ``unit_roundoff`` is u = 2^-(significand bits), the largest relative error of one rounding to nearest. ``smallest_subnormal``
    and ``smallest_normal`` are the smallest positive values with and without gradual underflow. All three are 0 for integers.
    ``largest`` is the largest finite value.
    """

    dtype: torch.dtype
    short: str
    exact_integer: int
    """The magnitude up to which the dtype represents every integer."""
    largest: float
    unit_roundoff: float = 0.0
    smallest_subnormal: float = 0.0
    smallest_normal: float = 0.0
    has_infinity: bool = False
    has_nan: bool = False

    @property
    def name(self) -> str:
        """torch's name, such as ``bfloat16``."""
        return dtype_name(self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def is_integer(self) -> bool:
        """True if values are integers, whose sums and products are exact until they overflow."""
        return not self.has_nan


def _float(dtype: torch.dtype, short: str, significand_bits: int, least_exponent: int, *, infinity: bool = True) -> DTypeInfo:
    return DTypeInfo(
        dtype=dtype,
        short=short,
        unit_roundoff=2.0**-significand_bits,
        smallest_subnormal=2.0 ** (least_exponent - significand_bits + 1),
        smallest_normal=2.0**least_exponent,
        exact_integer=2**significand_bits,
        largest=torch.finfo(dtype).max,
        has_infinity=infinity,
        has_nan=True,
    )


def _integer(dtype: torch.dtype, short: str) -> DTypeInfo:
    most = torch.iinfo(dtype).max
    return DTypeInfo(dtype=dtype, short=short, exact_integer=most, largest=most)


DTYPES: dict[torch.dtype, DTypeInfo] = {
    info.dtype: info
    for info in (
        _float(torch.float64, "f64", 53, -1022),
        _float(torch.float32, "f32", 24, -126),
        _float(torch.float16, "f16", 11, -14),
        _float(torch.bfloat16, "bf16", 8, -126),
    )
}
"""Dtypes of the dense operations."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The 8-bit floats of the Open Compute Project: dtypes of a and b of scaled_mm, and of the weights of mixed_mm."""
FLOAT8_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""The 8-bit floats of AMD's CDNA 3, for a and b of scaled_mm only. They have no infinity, no -0, and one NaN at the code of -0."""

_OTHERS: dict[torch.dtype, DTypeInfo] = {
    info.dtype: info
    for info in (
        _integer(torch.int8, "i8"),
        _integer(torch.uint8, "u8"),
        _integer(torch.int32, "i32"),
        _float(torch.float8_e4m3fn, "e4m3", 4, -6, infinity=False),
        _float(torch.float8_e5m2, "e5m2", 3, -14),
        _float(torch.float8_e4m3fnuz, "e4m3fnuz", 4, -7, infinity=False),
        _float(torch.float8_e5m2fnuz, "e5m2fnuz", 3, -15, infinity=False),
    )
}
"""Dtypes of the remaining operations. "FP8 Formats for Deep Learning" (Micikevicius et al., 2022) defines the first two 8-bit
floats: e4m3fn has no infinity and one NaN for each sign. "8-bit Numerical Formats for Deep Neural Networks" (Noune et al., 2022)
defines the other two."""

DType = torch.dtype | str
"""Dtype, or a name of one."""


def dtype_info(dtype: torch.dtype) -> DTypeInfo:
    """Return the facts about ``dtype``. Raise InvalidProblemError if no operation supports it."""
    info = DTYPES.get(dtype) or _OTHERS.get(dtype)
    if info is None:
        known = ", ".join(i.name for i in (*DTYPES.values(), *_OTHERS.values()))
        raise InvalidProblemError(f"dtype: got {dtype}, expected one of {known}")
    return info


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of the dtype without the prefix, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def is_float8(dtype: torch.dtype) -> bool:
    """Return True for an 8-bit float of either family."""
    return dtype in FLOAT8 or dtype in FLOAT8_FNUZ


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype for a name such as ``bfloat16`` or ``bf16``. Raise InvalidProblemError if no operation supports it."""
    full = full_dtype_name(name)
    known = {info.name: dtype for dtype, info in (*DTYPES.items(), *_OTHERS.items())}
    if full not in known:
        hint = "; for float32 in tf32 precision give precision=Precision(input_mode='tf32')" if full == "tf32" else ""
        raise InvalidProblemError(f"dtype: got {name!r}, expected one of {', '.join(known)}{hint}")
    return known[full]


def as_dtype(dtype: DType) -> torch.dtype:
    """Return a dtype that is given as such or by name."""
    return parse_dtype(dtype) if isinstance(dtype, str) else dtype


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products are summed: float64 for float64, int32 for int8, float32 for the narrower floats."""
    return {torch.float64: torch.float64, torch.int8: torch.int32}.get(dtype, torch.float32)
