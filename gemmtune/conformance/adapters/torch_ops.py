"""torch's own operations."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ..labels import BIASES
from ..layouts import KINDS
from ..traits import Traits

__all__ = ["dense", "float8_cpu", "float8_cuda", "int8_cpu", "int8_cuda"]


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)


def _int_mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch._int_mm(a, b) if out is None else torch._int_mm(a, b, out=out)


_DENSE = Traits(
    ops=("mm", "addmm", "bmm", "baddbmm"),
    dtypes=("float32", "float16", "bfloat16", "float64"),
    layouts=tuple(KINDS),
    out=True,
    alpha=True,
    beta=True,
    bias=BIASES,
    empty=True,
    streams=True,
    capturable=True,
    threads=True,
)
_INT8 = Traits(ops=("int_mm",), out=True, streams=True, capturable=True, threads=True)

dense = SimpleNamespace(mm=torch.mm, addmm=torch.addmm, bmm=torch.bmm, baddbmm=torch.baddbmm, gemm_traits=_DENSE)
int8_cpu = SimpleNamespace(int_mm=_int_mm, gemm_traits=_INT8.changed({"devices": ("cpu",)}))
int8_cuda = SimpleNamespace(
    int_mm=_int_mm, gemm_traits=_INT8.changed({"devices": ("cuda",), "least": (17, 8, 8), "multiples": (1, 8, 8)})
)
"""Asks for M above 16, and N and K in multiples of 8."""
float8_cpu = SimpleNamespace(scaled_mm=_scaled_mm, gemm_traits=Traits(ops=("scaled_mm",), devices=("cpu",)))
float8_cuda = SimpleNamespace(
    scaled_mm=_scaled_mm,
    gemm_traits=Traits(ops=("scaled_mm",), devices=("cuda",), scales=("tensor", "row"), multiples=(1, 16, 16), min_alignment=16),
)
"""Asks for a row-major a, a column-major b, and N and K in multiples of 16. Other strides are refused."""
