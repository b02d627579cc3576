"""Legal words of options and files of shapes. Plain data, so that help needs no torch, and a test compares it with the package."""

import re
from pathlib import Path
from typing import get_args

from ..operand_kinds import BiasShape, Encoding, Gate, Imbalance, Scales, WeightScales


def _operations() -> tuple[str, ...]:
    """Return the public functions of the table of operations, read from its source, because its import needs torch."""
    problem = Path(__file__).parents[1] / "problem"
    rows = re.findall(r'\b_row\(\s*"(\w+)"', (problem / "operations.py").read_text(encoding="utf-8"))
    more = re.findall(r'"(\w+)": Brought\(op="(\w+)"', (problem / "fused.py").read_text(encoding="utf-8"))
    return tuple(name for row in rows for name in (row, *(other for other, op in more if op == row != other)))


OPS = _operations()
"""Operations that can be tuned. int_mm_mul is int_mm with an epilogue."""
DEVICES = ("cpu", "cuda", "cuda:0")
"""Devices that a shell completes. Others are cuda:N."""
SEVERAL_DEVICES = ("all", "cpu", "0,1")
"""Words for several devices that a shell completes."""
LAYOUTS = ("nn", "nt", "tn", "tt")
BIASES = get_args(BiasShape)
FACTORS = ("tensor", "row", "column")
"""Part of the result that shares a scale in int_mm_mul: all of it, or each row or column."""
SCALES_OF_SCALED_MM = get_args(Scales)
SCALES_OF_WEIGHTS = get_args(WeightScales)
SCALES = tuple(dict.fromkeys((*SCALES_OF_SCALED_MM, *SCALES_OF_WEIGHTS, *FACTORS)))
IMBALANCES = get_args(Imbalance)
GATES = get_args(Gate)[1:]
ENCODINGS = get_args(Encoding)[1:]
WEIGHT_DTYPES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
"""float8 dtypes of scaled_mm. The last two are for AMD's gfx942."""
DTYPES = ("float64", "float32", "float16", "bfloat16", "tf32", "int8", *FLOAT8)
B_DTYPES = tuple(dict.fromkeys((*WEIGHT_DTYPES, *FLOAT8)))
"""Dtypes of a b whose dtype differs from a's, in mixed_mm and scaled_mm."""
RESULT_DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes of scales, and of results that the caller selects."""
ARCHITECTURES = ("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "avx512", "avx2", "portable")
