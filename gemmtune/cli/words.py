"""Legal words of options and files of shapes. Plain data, so that help needs no torch, and a test compares it with the package."""

OPS = (
    "mm", "addmm", "bmm", "baddbmm", "mm_plus_mm", "int_mm", "int_mm_mul", "mixed_mm", "scaled_mm", "bsr_mm", "bsr_addmm",
    "grouped_mm", "mixed_grouped_mm", "scaled_grouped_mm", "routed_grouped_mm", "combined_grouped_mm", "grouped_k_mm",
)  # fmt: skip
"""Operations that can be tuned. int_mm_mul is int_mm with an epilogue."""
LAYOUTS = ("nn", "nt", "tn", "tt")
BIASES = ("n", "mn", "m1", "1n", "scalar")
FACTORS = ("tensor", "row", "column")
"""Part of the result that shares a scale in int_mm_mul: all of it, or each row or column."""
SCALES_OF_SCALED_MM = ("tensor", "row", "block_1x128", "block_128x128")
SCALES_OF_WEIGHTS = ("none", "tensor", "column", "group_32", "group_64", "group_128")
SCALES = tuple(dict.fromkeys((*SCALES_OF_SCALED_MM, *SCALES_OF_WEIGHTS, *FACTORS)))
IMBALANCES = ("even", "skewed")
GATES = ("silu", "gelu", "gelu_tanh")
ENCODINGS = ("int4", "uint4")
WEIGHT_DTYPES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
"""float8 dtypes of scaled_mm. The last two are for AMD's gfx942."""
DTYPES = ("float64", "float32", "float16", "bfloat16", "tf32", "int8", *FLOAT8)
B_DTYPES = tuple(dict.fromkeys((*WEIGHT_DTYPES, *FLOAT8)))
"""Dtypes of a b whose dtype differs from a's, in mixed_mm and scaled_mm."""
RESULT_DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes of scales, and of results that the caller selects."""
ARCHITECTURES = ("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "avx512", "avx2", "portable")
