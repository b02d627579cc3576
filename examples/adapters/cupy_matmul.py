"""cupy.matmul on memory that it shares with torch."""

from __future__ import annotations

from typing import Any

import cupy
import torch

from gemmtune.declaration.layouts import KINDS
from gemmtune.declaration.traits import Traits

__all__ = ["bmm", "gemm_traits", "mm"]

gemm_traits = Traits(
    ops=("mm", "bmm"),
    dtypes=("float32", "float16", "float64"),
    layouts=tuple(KINDS),
    out=True,
    empty=True,
    devices=("cuda",),
    streams=True,
)
"""cupy has no bfloat16."""


def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b on torch's current stream, into ``out`` if given."""
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(a.device).cuda_stream)
    with cupy.cuda.Device(a.device.index or 0), stream:
        result = cupy.matmul(_shared(a), _shared(b), out=None if out is None else _shared(out))
        return torch.utils.dlpack.from_dlpack(result) if out is None else out


bmm = mm


def _shared(x: torch.Tensor) -> Any:
    return cupy.from_dlpack(x)
