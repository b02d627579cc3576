"""Arguments of a call as words for another process, which finds the tensors in memory that it shares."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..declaration.labels import DTYPES
from ..problem.precision import precision_of
from .memory import Memory, Placed

MOST_SIZES = 64
"""Largest number of dimensions of a tensor."""


def base(tensor: Any) -> int:
    """Return the address of a tensor's storage, or -1 for another value."""
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided else -1


def flags_here() -> dict[str, Any]:
    """Return torch's precision of CUDA products in this process, which is to hold in the other one too."""
    fp16, bf16 = (precision_of(dtype, "cuda").reduced_partials for dtype in (torch.float16, torch.bfloat16))
    return {"fp32": precision_of(torch.float32, "cuda").input_mode, "fp16": fp16, "bf16": bf16}


def tensors_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensor, or those of a block-sparse one."""
    if tensor.layout == torch.sparse_bsr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor,)


def argument(value: Any, placed: Mapping[int, Placed]) -> Any:
    """Return an argument as the process reads it."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout == torch.sparse_bsr:
        return {"bsr": [argument(x, placed) for x in tensors_of(value)], "shape": list(value.shape)}
    storage = placed.get(base(value))
    return {
        "at": storage.at if storage else 0, "bytes": storage.own.numel() if storage else 0, "offset": value.storage_offset(),
        "of": str(value.dtype).removeprefix("torch."), "size": list(value.shape), "stride": list(value.stride()),
    }  # fmt: skip


def received(memory: Memory, answer: Mapping[str, Any], at: int, most_bytes: int) -> Any:
    """Return a copy of the result at a byte of the memory, or a value of the type that was returned. Poison its place."""
    dtype, size = DTYPES.get(str(answer.get("dtype")), getattr(torch, str(answer.get("dtype")), None)), answer.get("size")
    counts = isinstance(size, list) and len(size) <= MOST_SIZES and all(isinstance(x, int) and x >= 0 for x in size)
    if not isinstance(dtype, torch.dtype) or not isinstance(size, list) or not counts:
        return type(str(answer.get("type", "object"))[:40] or "object", (), {})()
    nbytes = math.prod(size) * dtype.itemsize
    if nbytes > min(memory.size - at, most_bytes):
        return torch.empty(0, dtype=dtype)
    result = memory.result(at, size, dtype).clone()
    memory.poison(at, nbytes)
    return result
