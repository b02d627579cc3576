"""Words of case ids, traits and options."""

import functools
import re
from typing import get_args

import torch

from ..errors import CaseError
from ..problem.contiguous import BiasShape
from ..problem.dtypes import dtype_info
from ..problem.fused import BROUGHT, NAMES, factor_shapes
from ..problem.grouped_compositions import GATES as FUNCTIONS
from ..problem.operation import Operation
from ..problem.operations import GROUPED_OPS, SPARSE_OPS, Encoding
from ..problem.scales import Scales, WeightScales
from ..problem.sparsity import Sparsity

STRIDED = tuple(name for name, row in NAMES.items() if not row.grouped and not row.sparse)
"""Operations with strided operands, without grouped ones."""
GROUPED = GROUPED_OPS
"""Operations with one product for each group of rows of a, or of terms."""
SPARSE = SPARSE_OPS
"""Operations with a block-sparse weight."""
SINGLE = (*STRIDED, *SPARSE)
"""Operations with one product, or with two that are added."""
ROWS: dict[str, Operation] = {op: NAMES[op] for op in (*STRIDED, *GROUPED, *SPARSE)}
"""Operations to their rows of the table of operations."""
OPS = tuple(ROWS)
ONE_PRODUCT = tuple(op for op in STRIDED if not NAMES[op].second)
"""Operations that multiply two matrices."""
BIASES = get_args(BiasShape)
GATES = tuple(FUNCTIONS)
"""Functions of gates."""


def _scales_of(op: str) -> tuple[str, ...]:
    """Return the granularities of one scale that an operation's row allows, none if it has no scales."""
    if op in BROUGHT and BROUGHT[op].required:
        return tuple(factor_shapes(1, 1))
    row = ROWS[op]
    scale = row.operand("scale_b")
    if scale is None:
        return ()
    words = get_args(Scales if row.operand("scale_a") is not None else WeightScales)
    absent = {"none": scale.required, "tensor": (None, None) not in scale.blocks}
    return tuple(word for word in words if not absent.get(word, False))


SCALES_OF = {op: words for op in ROWS if (words := _scales_of(op))}
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
    "int8": (torch.int8, ""), "uint8": (torch.uint8, ""), "int4": (torch.uint8, "int4"), "uint4": (torch.uint8, "uint4"),
    "float8_e4m3fn": (torch.float8_e4m3fn, ""), "float8_e5m2": (torch.float8_e5m2, ""),
}  # fmt: skip
"""Types of a widened b: the tensor's dtype, and the encoding that packs two numbers into each byte."""
INDEX_DTYPES = ("int64", "int32")
"""Dtypes of the index operands that pick rows or place them."""
BLOCK_SIDES = ("16x16", "32x32", "8x24", "64x16", "48x4")
"""Rows x columns of the blocks that are tried if none are declared."""
BLOCK_KINDS = ("@0.5", "@0.2+skewed", "@0.3+int64", "@0")
"""Density of blocks, their distribution if not even, and the width of their indices if not 32 bits."""
PLAIN_BLOCKS = BLOCK_SIDES[0] + BLOCK_KINDS[0]
_BLOCKS = re.compile(r"(\d{1,18})x(\d{1,18})@(\d{1,18}(?:\.\d{1,18})?)(\+skewed)?(\+int64)?")
_SIDES = re.compile(r"[1-9]\d{0,17}x[1-9]\d{0,17}")


def is_sides(text: str) -> bool:
    """Return True if a text has the form rows x columns."""
    return bool(_SIDES.fullmatch(text))


def sparsity_of_text(text: str) -> Sparsity:
    """Return the class of a text such as ``32x16@0.5+skewed+int64``. Raises CaseError or InvalidProblemError for another one."""
    found = _BLOCKS.fullmatch(text)
    if found is None:
        raise CaseError(f"blocks: got {text!r}, expected rows x columns @ density, then +skewed or +int64, such as {PLAIN_BLOCKS}")
    rows, columns, density, skewed, wide = found.groups()
    return Sparsity(
        block_n=int(rows),
        block_k=int(columns),
        density=float(density),
        imbalance="skewed" if skewed else "even",
        wide_index=bool(wide),
    )


def plain_scales(op: str) -> str:
    """Return the granularity of scales of a case that names none."""
    words = SCALES_OF.get(op, ("tensor",))
    return "tensor" if "tensor" in words else words[0]


@functools.cache
def weights_of(op: str) -> tuple[str, ...]:
    """Return the types of b that an operation allows besides that of a: narrow weights, or the other 8-bit float."""
    row = ROWS[op]
    if row.widens_b:
        legal, packs = row.dtypes_of_b, "encoding" in row.options
        return tuple(word for word, (dtype, encoding) in WEIGHTS.items() if dtype in legal and (packs or not encoding))
    return FLOAT8 if row.float8 else ()
