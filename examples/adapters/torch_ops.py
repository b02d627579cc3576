"""torch's own operations."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from gemmtune.declaration.labels import BIASES, NARROW_FLOATS, SCALES_OF, WEIGHTS
from gemmtune.declaration.layouts import KINDS
from gemmtune.declaration.traits import Traits
from gemmtune.numerics.quantized import numbers
from gemmtune.problem.operations import Encoding

__all__ = ["dense", "float8_cpu", "float8_cuda", "int8_cpu", "int8_cuda", "sums", "weights", "weights_int8_cpu"]


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)


def _int_mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch._int_mm(a, b) if out is None else torch._int_mm(a, b, out=out)


def _mixed_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_b: torch.Tensor | None = None,
    zero_b: torch.Tensor | None = None,
    encoding: Encoding = "",
) -> torch.Tensor:
    """What one writes in torch: the weights as a matrix of a's dtype, then a product."""
    matrix = numbers(b, encoding).to(a.dtype)
    for scale, apply in ((zero_b, torch.sub), (scale_b, torch.mul)):
        if scale is not None:
            matrix = apply(matrix, _by_row(scale, len(matrix)))
    return a @ matrix.to(a.dtype)


def _by_row(scale: torch.Tensor, k: int) -> torch.Tensor:
    """Scales of groups along K repeated for each element of them."""
    if scale.dim() < 2 or scale.shape[0] == 1:
        return scale
    group = next(size for size in (32, 64, 128) if -(-k // size) == scale.shape[0])
    return scale.repeat_interleave(group, 0)[:k]


def _mm_plus_mm(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """What one writes in torch: the second product, then the first one with it added."""
    return torch.addmm(torch.mm(c, d), a, b) if out is None else torch.addmm(torch.mm(c, d), a, b, out=out)


def _weight_int8(a: torch.Tensor, b: torch.Tensor, *, scale_b: torch.Tensor) -> torch.Tensor:
    """torch's own kernel for int8 weights [N, K] with a scale for each column of b."""
    return torch._weight_int8pack_mm(a, b.t().contiguous(), scale_b.flatten())


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
sums = SimpleNamespace(mm_plus_mm=_mm_plus_mm, gemm_traits=_DENSE.changed({"ops": ("mm_plus_mm",)}))
int8_cpu = SimpleNamespace(int_mm=_int_mm, gemm_traits=_INT8.changed({"devices": ("cpu",)}))
int8_cuda = SimpleNamespace(
    int_mm=_int_mm, gemm_traits=_INT8.changed({"devices": ("cuda",), "least": (17, 8, 8), "multiples": (1, 8, 8)})
)
"""Asks for M above 16, and N and K in multiples of 8."""
float8_cpu = SimpleNamespace(scaled_mm=_scaled_mm, gemm_traits=Traits(ops=("scaled_mm",), devices=("cpu",), least=(0, 0, 1)))
"""Asks for K of at least 1. torch 2.11 does not write the result of fewer terms."""
float8_cuda = SimpleNamespace(
    scaled_mm=_scaled_mm,
    gemm_traits=Traits(ops=("scaled_mm",), devices=("cuda",), scales=("tensor", "row"), multiples=(1, 16, 16), min_alignment=16),
)
"""Asks for a row-major a, a column-major b, and N and K in multiples of 16. Other strides are refused."""
weights = SimpleNamespace(
    mixed_mm=_mixed_mm,
    gemm_traits=Traits(
        ops=("mixed_mm",),
        dtypes=NARROW_FLOATS,
        weights=tuple(WEIGHTS),
        scales=SCALES_OF["mixed_mm"],
        zeros=True,
        streams=True,
        capturable=True,
        threads=True,
    ),
)
"""Weights of all kinds as a composition of torch's operations."""
weights_int8_cpu = SimpleNamespace(
    mixed_mm=_weight_int8, gemm_traits=Traits(ops=("mixed_mm",), dtypes=NARROW_FLOATS, scales=("column",), devices=("cpu",))
)
