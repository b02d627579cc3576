"""QuACK: GEMMs in CuTe DSL for SM80 and newer."""

from __future__ import annotations

import quack.gemm_interface
import torch

from gemmtune.declaration.traits import Traits

__all__ = ["addmm", "bmm", "gemm_traits", "mm"]

gemm_traits = Traits(
    ops=("mm", "addmm", "bmm"),
    dtypes=("float16", "bfloat16"),
    layouts=("row", "col", "padded"),
    out=True,
    alpha=True,
    beta=True,
    bias=("mn",),
    multiples=(8, 8, 8),
    min_alignment=16,
    streams=True,
    devices=("cuda",),
)
"""Its kernels copy 16 bytes at a time."""


def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b with the default config: tuning would measure at each new size."""
    result: torch.Tensor = quack.gemm_interface.gemm(a, b, out=out, tuned=False)
    return result


bmm = mm


def addmm(
    inp: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """alpha · a @ b + beta · inp."""
    result: torch.Tensor = quack.gemm_interface.gemm_add(a, b, inp, out=out, alpha=alpha, beta=beta, tuned=False)
    return result
