"""Numbers of cuBLASLt's binary interface that we use (cublasLt.h, cublas_api.h and library_types.h of the CUDA toolkit)."""

import ctypes
from enum import IntEnum, IntFlag

import torch

DATA_TYPES: dict[torch.dtype, int] = {
    torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.int8: 3, torch.int32: 10, torch.bfloat16: 14,
    torch.float8_e4m3fn: 28, torch.float8_e5m2: 29,
}  # fmt: skip
"""cudaDataType_t by dtype."""
COMPUTE_TYPES: dict[torch.dtype, int] = {torch.float32: 68, torch.float64: 70, torch.int32: 72}
"""cublasComputeType_t by accumulator: CUBLAS_COMPUTE_32F reads float32 operands in full, CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_32I."""
COMPUTE_TF32 = 77
"""CUBLAS_COMPUTE_32F_FAST_TF32."""
Scalar = type[ctypes.c_float] | type[ctypes.c_double] | type[ctypes.c_int32]
SCALARS: dict[torch.dtype, Scalar] = {
    torch.float32: ctypes.c_float, torch.float64: ctypes.c_double, torch.int32: ctypes.c_int32,
}  # fmt: skip
"""Host type of alpha and beta by accumulator."""


Operation = IntEnum("Operation", {"N": 0, "T": 1})
"""cublasOperation_t."""
DescAttribute = IntEnum(
    "DescAttribute",
    {
        "TRANSA": 3, "TRANSB": 4, "EPILOGUE": 7, "BIAS_POINTER": 8, "BIAS_BATCH_STRIDE": 10, "A_SCALE_POINTER": 17,
        "B_SCALE_POINTER": 18, "FAST_ACCUM": 25, "A_SCALE_MODE": 31, "B_SCALE_MODE": 32,
    },
)  # fmt: skip
"""cublasLtMatmulDescAttributes_t."""
LayoutAttribute = IntEnum("LayoutAttribute", {"BATCH_COUNT": 5, "STRIDED_BATCH_OFFSET": 6})
"""cublasLtMatrixLayoutAttribute_t."""
PreferenceAttribute = IntEnum(
    "PreferenceAttribute",
    {
        "MAX_WORKSPACE_BYTES": 1, "REDUCTION_SCHEME_MASK": 3, "MIN_ALIGNMENT_A_BYTES": 5, "MIN_ALIGNMENT_B_BYTES": 6,
        "MIN_ALIGNMENT_C_BYTES": 7, "MIN_ALIGNMENT_D_BYTES": 8,
    },
)  # fmt: skip
"""cublasLtMatmulPreferenceAttributes_t."""
Epilogue = IntEnum("Epilogue", {"DEFAULT": 1, "BIAS": 4})
"""cublasLtEpilogue_t."""


class ScaleMode(IntEnum):
    """cublasLtMatmulMatrixScale_t: the part of an operand that shares a scale."""

    SCALAR = 0
    OUTER_VECTOR = 3
    """One scale for each row of A and each column of B."""
    VECTOR_128 = 4
    """One scale for each 128 elements along K of a row or column."""
    BLOCK_128X128 = 5


class ReductionScheme(IntFlag):
    """cublasLtReductionScheme_t: the place and type in which the partial sums of a split K are added."""

    NONE = 0
    INPLACE = 1
    """Partial sums lie in the output buffer, and thus in the output's type."""
    COMPUTE_TYPE = 2
    OUTPUT_TYPE = 4


AlgorithmAttribute = IntEnum(
    "AlgorithmAttribute", ["ID", "TILE", "SPLITK", "REDUCTION", "SWIZZLE", "CUSTOM", "STAGES", "INNER", "CLUSTER"], start=0
)
"""cublasLtMatmulAlgoConfigAttributes_t, which together identify an algorithm."""
ATTRIBUTE_TYPES = {
    AlgorithmAttribute.ID: ctypes.c_int32, AlgorithmAttribute.SPLITK: ctypes.c_int32, AlgorithmAttribute.INNER: ctypes.c_uint16,
    AlgorithmAttribute.CLUSTER: ctypes.c_uint16,
}  # fmt: skip
"""C types of the attributes that are not uint32."""


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t, whose first member is the opaque cublasLtMatmulAlgo_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )
