"""Kinds of operands by name. They need no torch, so the command's help reads them too."""

from typing import Literal

BiasShape = Literal["n", "mn", "m1", "1n", "scalar"]
"""The shape of an added operand: [N], [M, N], [M, 1], [1, N] or a scalar."""
Scales = Literal["tensor", "row", "block_1x128", "block_128x128"]
"""The scales of scaled_mm: one for each operand; one for each row of a and each column of b; one for each 128 elements along K
of a row or column; or for b one for each 128×128 block."""
WeightScales = Literal["none", "tensor", "column", "group_32", "group_64", "group_128"]
"""The scales of b in mixed_mm: none, one number, one for each column, or one for each 32, 64 or 128 elements of a column."""
ModelDtype = Literal["bf16", "fp16", "fp32", "int8", "int4", "fp8"]
"""The dtypes of a model's weights: floats, or what ``quantize_`` makes of them."""
Encoding = Literal["", "int4", "uint4"]
"""The encoding of b: its dtype alone, or two numbers in each uint8, with the number of the even k in the low four bits."""
Imbalance = Literal["even", "skewed"]
"""Balance of the blocks: ``even`` if the longest block row has at most SKEWED times the mean number of blocks, plus one."""
_NAMES = {
    "float64": ("double", "fp64", "f64"), "float32": ("float", "fp32", "f32"), "float16": ("half", "fp16", "f16"),
    "bfloat16": ("bf16",), "int8": ("i8",), "uint8": ("u8",), "int32": ("i32",), "int64": ("i64",),
    "float8_e4m3fn": ("e4m3fn", "e4m3"), "float8_e5m2": ("e5m2",),
    "float8_e4m3fnuz": ("e4m3fnuz",), "float8_e5m2fnuz": ("e5m2fnuz",),
}  # fmt: skip
"""Dtypes of torch to their other names."""
_FULL_NAMES = {short: name for name, others in _NAMES.items() for short in others}


def full_dtype_name(text: str) -> str:
    """Return torch's name of a dtype: ``bfloat16`` for ``bf16``, ``torch.bfloat16``, ``BF16``; other texts unchanged."""
    plain = text.strip().lower().removeprefix("torch.")
    return plain if plain in _NAMES or plain == "tf32" else _FULL_NAMES.get(plain, text)


Gate = Literal["", "silu", "gelu", "gelu_tanh"]
"""Activation of the half of b's columns that are gates; empty for a product without gates."""
