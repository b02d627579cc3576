"""The words of case ids, traits and options."""

from __future__ import annotations

import torch

__all__ = ["BIASES", "DTYPES", "FLOATS", "OPS", "SCALES", "SHORT_DTYPES"]

OPS = ("mm", "addmm", "bmm", "baddbmm", "int_mm", "scaled_mm")
BIASES = ("n", "mn", "m1", "1n", "scalar")
SCALES = ("tensor", "row")
"""One scale for each of a and b, or one for each row of a and each column of b."""

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tf32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
"""Input dtypes; ``tf32`` is float32 under torch's tf32 setting."""
FLOATS = ("float32", "float16", "bfloat16", "float64")
"""What is tried where no dtypes are declared, in this order."""
SHORT_DTYPES = {
    "float64": "f64", "float32": "f32", "tf32": "tf32", "float16": "f16", "bfloat16": "bf16",
    "int8": "i8", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2",
}  # fmt: skip
"""As case ids have them."""
