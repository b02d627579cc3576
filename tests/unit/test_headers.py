"""Numbers that we give to CUDA's driver are those of its header, which Triton brings."""

from __future__ import annotations

import importlib.resources
import re

import torch
from extras import needs

from gemmtune.toolchain import driver
from gemmtune.toolchain.record import MAP_TYPES, Swizzle, TensorMap
from gemmtune.untrusted.gemm_process import state

ENUMERATOR = re.compile(r"^\s*,?\s*(CU\w+)\s*(?:=\s*(0x[0-9a-f]+|\d+))?", re.MULTILINE)
DTYPES = {"UINT8": torch.uint8, "FLOAT16": torch.float16, "FLOAT32": torch.float32, "BFLOAT16": torch.bfloat16}


def enumerators() -> dict[str, int]:
    """Return the value of each enumerator of the header. One without a value follows the one before it."""
    text = importlib.resources.files("triton").joinpath("backends/nvidia/include/cuda.h").read_text()
    found: dict[str, int] = {}
    for body in re.findall(r"enum \w+ \{(.*?)\}", text, re.DOTALL):
        value = -1
        for name, given in ENUMERATOR.findall(body):
            value = int(given, 0) if given else value + 1
            found.setdefault(name, value)  # comments repeat parts of enums
    return found


@needs("triton")
def test_numbers_are_those_of_cudas_header() -> None:
    known = enumerators()
    promotions = {
        size: TensorMap(operand=0, dtype=torch.float16, sizes=(8,), pitches=(), box=(8,), promotion_bytes=size).promotion
        for size in (64, 128, 256)
    }
    ours = {
        **{f"CU_TENSOR_MAP_DATA_TYPE_{name}": MAP_TYPES[dtype] for name, dtype in DTYPES.items()},
        "CU_TENSOR_MAP_SWIZZLE_NONE": Swizzle.NONE,
        "CU_TENSOR_MAP_SWIZZLE_64B": Swizzle.BYTES_64,
        "CU_TENSOR_MAP_SWIZZLE_128B": Swizzle.BYTES_128,
        **{f"CU_TENSOR_MAP_L2_PROMOTION_L2_{size}B": value for size, value in promotions.items()},
        "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION": driver.CLUSTER_DIMENSION,
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": driver.PROGRAMMATIC_STREAM_SERIALIZATION,
        "CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW": state.WINDOW_ATTRIBUTE,
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": driver.MAX_DYNAMIC_SHARED_BYTES,
        "CU_STREAM_CAPTURE_STATUS_ACTIVE": driver.CAPTURE_ACTIVE,
        "CUDA_ERROR_INVALID_CONTEXT": driver.INVALID_CONTEXT,
        "CU_LIMIT_PERSISTING_L2_CACHE_SIZE": state.LIMITS["persisting L2 bytes"],
        "CU_LIMIT_MAX_L2_FETCH_GRANULARITY": state.LIMITS["L2 fetch granularity"],
    }
    assert ours == {name: known[name] for name in ours}
    assert set(DTYPES.values()) == MAP_TYPES.keys()
