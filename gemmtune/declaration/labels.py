"""Words of case ids, traits and options."""

from __future__ import annotations

from typing import get_args

import torch

from ..problem.contiguous import BiasShape
from ..problem.dtypes import dtype_info
from ..problem.fused import NAMES, factor_shapes
from ..problem.operation import Operation
from ..problem.operations import SPARSE_OPS, Encoding
from ..problem.scales import Scales, WeightScales

STRIDED = tuple(name for name, row in NAMES.items() if not row.grouped and not row.sparse)
"""Operations with strided operands, without grouped ones."""
GROUPED = ("grouped_mm", "grouped_k_mm")
"""Operations with one product for each group of rows of a, or of terms: torch's grouped_mm with a 3-D and with a 2-D b."""
SPARSE = SPARSE_OPS
"""Operations with a block-sparse weight."""
SINGLE = (*STRIDED, *SPARSE)
"""Operations with one product, or with two that are added."""
ROWS: dict[str, Operation] = {op: NAMES[op] for op in (*STRIDED, *GROUPED, *SPARSE)}
"""Operations to their rows of the table of operations."""
OPS = tuple(ROWS)
ONE_PRODUCT = tuple(op for op in STRIDED if not NAMES[op].second)
"""Operations that multiply two matrices."""
QUANTIZED = tuple(op for op in STRIDED if NAMES[op].quantized)
"""Operations on 2-D operands of 8 bits or fewer, without an added operand."""
BIASES = get_args(BiasShape)

SCALES_OF: dict[str, tuple[str, ...]] = {
    "int_mm_mul": tuple(factor_shapes(1, 1)),
    "mixed_mm": get_args(WeightScales),
    "scaled_mm": get_args(Scales),
}
"""Granularities of one scale, by operation."""
SCALES = tuple(dict.fromkeys(word for words in SCALES_OF.values() for word in words))

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
"""Input dtypes. ``tf32`` is float32 under torch's tf32 setting."""
FLOATS = ("float32", "float16", "bfloat16", "float64")
"""Dtypes that are tried if none are declared, in this order."""
NARROW_FLOATS = ("float32", "float16", "bfloat16")
"""Dtypes of results, of scales, and of a of mixed_mm."""
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
SHORT_DTYPES = {name: dtype_info(dtype).short for name, dtype in DTYPES.items()} | {"tf32": "tf32"}
"""Names of dtypes in case ids."""
WEIGHTS: dict[str, tuple[torch.dtype, Encoding]] = {
    "int8": (torch.int8, ""),
    "uint8": (torch.uint8, ""),
    "int4": (torch.uint8, "int4"),
    "uint4": (torch.uint8, "uint4"),
    "float8_e4m3fn": (torch.float8_e4m3fn, ""),
    "float8_e5m2": (torch.float8_e5m2, ""),
}
"""Types of b of mixed_mm: the tensor's dtype, and the encoding that packs two numbers into each byte."""
