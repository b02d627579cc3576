"""The words of case ids, traits and options."""

from __future__ import annotations

from typing import get_args

import torch

from ..problem.contiguous import BiasShape
from ..problem.dtypes import dtype_info
from ..problem.fused import NAMES, factor_shapes
from ..problem.operation import Operation
from ..problem.operations import OPERATIONS, SPARSE_OPS, Encoding
from ..problem.scales import Scales, WeightScales

STRIDED = tuple(name for name, row in NAMES.items() if not row.grouped)
"""Operations whose operands are strided, but for grouped ones."""
GROUPED = ("grouped_mm", "grouped_k_mm")
"""A product for each group of rows of a, or of terms: torch's grouped_mm with a 3-D b and with a 2-D one."""
SPARSE = SPARSE_OPS
"""Operations with a block-sparse weight."""
SINGLE = (*STRIDED, *SPARSE)
"""Operations of one product, or of two that are added."""
ROWS: dict[str, Operation] = {**{op: NAMES[op] for op in (*STRIDED, *GROUPED)}, **{op: OPERATIONS[op] for op in SPARSE}}
"""The row of the table for each."""
OPS = tuple(ROWS)
ONE_PRODUCT = tuple(op for op in STRIDED if not NAMES[op].second)
"""Operations that multiply two matrices."""
QUANTIZED = tuple(op for op in STRIDED if NAMES[op].quantized)
"""Operations on operands of 8 bits or fewer; 2-D, with nothing added."""
BIASES = get_args(BiasShape)

SCALES_OF: dict[str, tuple[str, ...]] = {
    "int_mm_mul": tuple(factor_shapes(1, 1)),
    "mixed_mm": get_args(WeightScales),
    "scaled_mm": get_args(Scales),
}
"""What one scale is for."""
SCALES = tuple(dict.fromkeys(word for words in SCALES_OF.values() for word in words))

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
"""Input dtypes; ``tf32`` is float32 under torch's tf32 setting."""
FLOATS = ("float32", "float16", "bfloat16", "float64")
"""What is tried where no dtypes are declared, in this order."""
NARROW_FLOATS = ("float32", "float16", "bfloat16")
"""Dtypes of results, scales, and a of mixed_mm."""
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
SHORT_DTYPES = {name: dtype_info(dtype).short for name, dtype in DTYPES.items()} | {"tf32": "tf32"}
"""The names of dtypes in case ids."""
WEIGHTS: dict[str, tuple[torch.dtype, Encoding]] = {
    "int8": (torch.int8, ""),
    "uint8": (torch.uint8, ""),
    "int4": (torch.uint8, "int4"),
    "uint4": (torch.uint8, "uint4"),
    "float8_e4m3fn": (torch.float8_e4m3fn, ""),
    "float8_e5m2": (torch.float8_e5m2, ""),
}
"""b of mixed_mm: its dtype, and how two numbers are packed into each byte."""
