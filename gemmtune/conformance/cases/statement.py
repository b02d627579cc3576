"""The Problem that a case states."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...dispatch.fused import multiply
from ...problem import Epilogue, Layout, Precision, Problem
from ...problem.scales import scale_layouts, weight_scale_layout
from ...problem.trace import trace
from ..labels import DTYPES, WEIGHTS
from ..layouts import PLAIN, OperandLayout
from .case import Case

__all__ = ["problem_of"]


def problem_of(case: Case, device_type: str) -> Problem:
    """What ``case`` asks. An epilogue is there for int_mm_mul alone: the sum times a factor."""
    dtype = DTYPES[case.dtype]
    lead = (case.batch,) if case.batched else ()
    out_size = (*lead, case.m, case.n)
    encoding = WEIGHTS[case.weights or "int8"][1] if case.row.widens_b else ""
    inp: Layout | None = None
    if case.added:
        shapes = {"n": (case.n,), "mn": out_size, "m1": (case.m, 1), "1n": (1, case.n), "scalar": ()}
        inp = OperandLayout.parse(case.inp).layout(shapes[case.bias], dtype)
    return Problem(
        op=case.row.name,
        a=OperandLayout.parse(case.a).layout((*lead, case.m, case.k), dtype),
        b=OperandLayout.parse(case.b).layout((*lead, case.k // 2 if encoding else case.k, case.n), case.b_dtype),
        out=OperandLayout.parse(case.out or PLAIN).layout(out_size, _result_dtype(case)),
        inp=inp,
        alpha=case.alpha if case.added else "one",  # type: ignore[arg-type]
        beta=case.beta if case.added else "zero",  # type: ignore[arg-type]
        device_type=device_type,
        encoding=encoding,
        epilogue=_factor(case) if case.op != case.row.name else None,
        precision=Precision(input_mode="tf32" if case.dtype == "tf32" else "ieee"),
        **_second(case),
        **_scales(case),
    )


def _second(case: Case) -> dict[str, Any]:
    """c and d of mm_plus_mm, with the strides of a and b."""
    if not case.row.second:
        return {}
    _, k2 = case.summed
    c, d = OperandLayout.parse(case.a), OperandLayout.parse(case.b)
    return {"c": c.layout((case.m, k2), DTYPES[case.dtype]), "d": d.layout((k2, case.n), DTYPES[case.dtype])}


def _scales(case: Case) -> dict[str, Any]:
    """scale_a, scale_b and zero_b, with the strides of ``inp``."""
    kind: Any = case.scales
    if case.row.float8:
        scale_a, scale_b = scale_layouts(case.m, case.n, case.k, kind)
        return {"scale_a": _strided(case, scale_a), "scale_b": _strided(case, scale_b)}
    if case.row.widens_b:
        scale = weight_scale_layout(case.n, case.k, kind, DTYPES[case.scale_dtype or case.dtype])
        layout = None if scale is None else _strided(case, scale)
        return {"scale_b": layout, "zero_b": layout if case.zeros == "yes" else None}
    return {}


def _strided(case: Case, layout: Layout) -> Layout:
    return OperandLayout.parse(case.inp).layout(layout.size, layout.dtype)


def _factor(case: Case) -> Epilogue:
    shapes = {"tensor": (), "row": (case.m, 1), "column": (case.n,)}
    factor = OperandLayout.parse(case.inp).layout(shapes[case.scales], DTYPES[case.scale_dtype or "float32"])
    like = torch.empty_strided(factor.size, factor.stride, dtype=factor.dtype, device="meta")
    return dataclasses.replace(trace(multiply, torch.float32, [like]), operands=(factor,))


def _result_dtype(case: Case) -> torch.dtype:
    if case.op != case.row.name:
        return DTYPES[case.scale_dtype or "float32"]
    return DTYPES[case.result] if case.result else case.row.result_dtype(DTYPES[case.dtype], epilogue=False)
