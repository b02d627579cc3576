"""numpy.matmul on memory that it shares with torch."""

from __future__ import annotations

import numpy as np
import torch

from gemmtune.declaration.layouts import KINDS
from gemmtune.declaration.traits import Traits

__all__ = ["bmm", "gemm_traits", "int_mm", "mm"]

gemm_traits = Traits(
    ops=("mm", "bmm", "int_mm"),
    dtypes=("float32", "float16", "float64", "int8"),
    layouts=tuple(KINDS),
    out=True,
    empty=True,
    devices=("cpu",),
    threads=True,
)
"""numpy has no bfloat16."""


def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b, into ``out`` if given."""
    with np.errstate(over="ignore", invalid="ignore"):
        if out is None:
            return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))
        np.matmul(a.numpy(), b.numpy(), out=out.numpy())
    return out


bmm = mm


def int_mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b in int32."""
    if out is None:
        return torch.from_numpy(np.matmul(a.numpy(), b.numpy(), dtype=np.int32))
    np.matmul(a.numpy(), b.numpy(), out=out.numpy(), dtype=np.int32)
    return out
