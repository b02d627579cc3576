"""The Problem of a case: an operand for each of the row's, with sizes by their symbols."""

import dataclasses
from typing import Any

import torch

from ...declaration.labels import DTYPES, WEIGHTS
from ...declaration.layouts import PLAIN, OperandLayout
from ...problem import Layout, Precision, Problem
from ...problem.contiguous import bias_shapes
from ...problem.fused import factor_shapes, multiply
from ...problem.operation import Operand
from ...problem.scales import scale_layouts, weight_scale_layout
from ...problem.trace import trace
from .case import Case


def problem_of(case: Case, device_type: str) -> Problem:
    """Return the problem of ``case``. It has an epilogue for int_mm_mul only: the sum times a factor."""
    dtype, sizes = DTYPES[case.dtype], case.extents
    strides = OperandLayout.parse(case.inp)
    row = case.row.given(["rows"] if case.tokens else [], gated=case.gated)
    result = DTYPES[case.result] if case.result else row.result_dtype(dtype, epilogue=False)
    fields: dict[str, Any] = {operand.role: _layout(case, operand) for operand in row.matrices}
    if case.op != row.name:
        result = DTYPES[case.scale_dtype or "float32"]
        factor = strides.layout(factor_shapes(case.m, case.n)[case.scales], result)
        like = torch.empty_strided(factor.size, factor.stride, dtype=factor.dtype, device="meta")
        fields["epilogue"] = dataclasses.replace(trace(multiply, torch.float32, [like]), operands=(factor,))
    if "encoding" in row.options:
        fields["encoding"] = WEIGHTS[case.weights or "int8"][1]
    out = tuple(row.extent(symbol, sizes) for symbol in row.out_symbols)
    if case.added:
        inp = strides.layout(bias_shapes(out)[case.bias], dtype)
        fields |= {"inp": inp, "alpha": case.alpha, "beta": case.beta}
    return Problem(
        op=row.name,
        out=OperandLayout.parse(case.out or PLAIN).layout(out, result),
        device_type=device_type,
        precision=Precision(input_mode="tf32" if case.dtype == "tf32" else "ieee"),
        sparsity=case.sparsity,
        gated=case.gated,
        **(fields | _scales(case, strides)),
    )


def _layout(case: Case, operand: Operand) -> Layout | None:
    """Return the layout of an operand whose size the row gives in symbols. ``_scales`` has those of scales."""
    role = operand.role
    if "S" in (operand.shape or ()):
        return None
    if role == "b" and case.sparsity is not None:
        return Layout.contiguous((case.n, case.k), case.b_dtype).transposed  # (K, N), the transpose of a weight (N, K)
    size = tuple(case.extents[symbol] for symbol in case.row.symbols(operand))
    if role == "b" and case.packed:
        size = (*size[:-2], size[-2] // 2, size[-1])
    first, second = (case.b, case.a) if case.k2 else (case.a, case.b)  # the strides of c and d
    strides = OperandLayout.parse({"a": case.a, "b": case.b, "c": first, "d": second}.get(role, PLAIN))
    return strides.layout(size, _dtype_of(case, operand))


def _dtype_of(case: Case, operand: Operand) -> torch.dtype:
    if operand.role == "b":
        return case.b_dtype
    if operand.role in case.index_roles:
        return getattr(torch, case.index or "int64")  # type: ignore[no-any-return]
    if operand.scales:
        return DTYPES[case.scale_dtype or case.dtype]
    return DTYPES[case.dtype] if operand.like_a or operand.role == "a" else operand.dtypes[0]


def _scales(case: Case, strides: OperandLayout) -> dict[str, Any]:
    """Return the layouts of scale_a, scale_b and zero_b, by name. Those of groups' matrices lie side by side, without gaps."""
    kind: Any = case.scales
    lead = (case.extents["G"],) if case.row.grouped else ()
    if case.row.float8:
        scale_a, scale_b = scale_layouts(case.extents["M"], case.n, case.k, kind)
        return {"scale_a": strides.layout(scale_a.size, scale_a.dtype), "scale_b": _scale_b(scale_b, lead, strides)}
    scale = weight_scale_layout(case.n, case.k, kind, DTYPES[case.scale_dtype or case.dtype]) if case.row.widens_b else None
    if scale is None:
        return {}
    layout = _scale_b(scale, lead, strides)
    return {"scale_b": layout, "zero_b": layout if case.zeros == "yes" else None}


def _scale_b(scale: Layout, lead: tuple[int, ...], strides: OperandLayout) -> Layout:
    if lead:
        return Layout.contiguous((*lead, *scale.size), scale.dtype)
    return strides.layout(scale.size, scale.dtype)
