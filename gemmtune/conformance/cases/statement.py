"""The Problem of a case."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...declaration.labels import DTYPES, WEIGHTS
from ...declaration.layouts import PLAIN, OperandLayout
from ...problem import Layout, Precision, Problem
from ...problem.contiguous import bias_shapes
from ...problem.fused import factor_shapes, multiply
from ...problem.scales import scale_layouts, weight_scale_layout
from ...problem.trace import trace
from .case import Case

PLAIN_GROUPS = 4
"""Groups of a case that gives no number."""


def problem_of(case: Case, device_type: str) -> Problem:
    """Return the problem of ``case``. It has an epilogue for int_mm_mul only: the sum times a factor."""
    dtype = DTYPES[case.dtype]
    strides_a, strides_b, strides = (OperandLayout.parse(text) for text in (case.a, case.b, case.inp))
    lead = (case.batch,) if case.batched else ()
    encoding = WEIGHTS[case.weights or "int8"][1] if case.row.widens_b else ""
    result = DTYPES[case.result] if case.result else case.row.result_dtype(dtype, epilogue=False)
    more: dict[str, Any] = {}
    if case.sparsity is not None:
        more["sparsity"] = case.sparsity
    if case.row.grouped:
        groups = int(case.groups or PLAIN_GROUPS)
        lead_b, lead_out = ((groups,), ()) if case.op == "grouped_mm" else ((), (groups,))
        more["offs"] = Layout.contiguous((groups,), torch.int32)
    else:
        lead_b, lead_out = lead, lead
    if case.row.second:
        _, k2 = case.summed
        strides_c, strides_d = (strides_b, strides_a) if case.k2 else (strides_a, strides_b)
        more |= {"c": strides_c.layout((case.m, k2), dtype), "d": strides_d.layout((k2, case.n), dtype)}
    if case.op != case.row.name:
        result = DTYPES[case.scale_dtype or "float32"]
        factor = strides.layout(factor_shapes(case.m, case.n)[case.scales], result)
        like = torch.empty_strided(factor.size, factor.stride, dtype=factor.dtype, device="meta")
        more["epilogue"] = dataclasses.replace(trace(multiply, torch.float32, [like]), operands=(factor,))
    return Problem(
        op=case.row.name,
        a=strides_a.layout((*lead, case.m, case.k), dtype),
        b=_weight(case)
        if case.sparsity is not None
        else strides_b.layout((*lead_b, case.k >> bool(encoding), case.n), case.b_dtype),
        out=OperandLayout.parse(case.out or PLAIN).layout((*lead_out, case.m, case.n), result),
        inp=strides.layout(bias_shapes((*lead, case.m, case.n))[case.bias], dtype) if case.added else None,
        alpha=case.alpha if case.added else "one",  # type: ignore[arg-type]
        beta=case.beta if case.added else "zero",  # type: ignore[arg-type]
        device_type=device_type,
        encoding=encoding,
        precision=Precision(input_mode="tf32" if case.dtype == "tf32" else "ieee"),
        **more,
        **_scales(case, strides),
    )


def _weight(case: Case) -> Layout:
    """Return the layout of b (K, N), the transpose of a weight (N, K)."""
    return Layout.contiguous((case.n, case.k), case.b_dtype).transposed


def _scales(case: Case, strides: OperandLayout) -> dict[str, Any]:
    """Return the layouts of scale_a, scale_b and zero_b, by name."""
    kind: Any = case.scales
    if case.row.float8:
        layouts = zip(("scale_a", "scale_b"), scale_layouts(case.m, case.n, case.k, kind), strict=True)
        return {name: strides.layout(layout.size, layout.dtype) for name, layout in layouts}
    scale = weight_scale_layout(case.n, case.k, kind, DTYPES[case.scale_dtype or case.dtype]) if case.row.widens_b else None
    if scale is None:
        return {}
    layout = strides.layout(scale.size, scale.dtype)
    return {"scale_b": layout, "zero_b": layout if case.zeros == "yes" else None}
