"""FlagGems: Triton kernels that take the place of ATen's."""

from __future__ import annotations

from types import SimpleNamespace

import flag_gems
import torch

from ..labels import BIASES
from ..traits import Traits

__all__ = ["dense", "with_out"]

_DTYPES = ("float32", "float16", "bfloat16")


def _baddbmm(inp: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    result: torch.Tensor = flag_gems.baddbmm(inp, a, b, beta=beta, alpha=alpha)
    return result


def _mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    result: torch.Tensor = flag_gems.mm(a, b) if out is None else flag_gems.mm_out(a, b, out=out)
    return result


def _addmm(
    inp: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    scalars = {"beta": beta, "alpha": alpha}
    result: torch.Tensor = (
        flag_gems.addmm(inp, a, b, **scalars) if out is None else flag_gems.addmm_out(inp, a, b, **scalars, out=out)
    )
    return result


def _bmm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    result: torch.Tensor = flag_gems.bmm(a, b) if out is None else flag_gems.bmm_out(a, b, out)
    return result


dense = SimpleNamespace(
    mm=_mm, addmm=_addmm, bmm=_bmm, baddbmm=_baddbmm,
    gemm_traits=Traits(
        ops=("mm", "addmm", "bmm", "baddbmm"), dtypes=_DTYPES, alpha=True, beta=True, bias=BIASES, streams=True, devices=("cuda",)
    ),
)  # fmt: skip
with_out = SimpleNamespace(
    mm=_mm, addmm=_addmm, bmm=_bmm,
    gemm_traits=Traits(
        ops=("mm", "addmm", "bmm"), dtypes=_DTYPES, alpha=True, beta=True, bias=BIASES, streams=True, devices=("cuda",), out=True
    ),
)  # fmt: skip
