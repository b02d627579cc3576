"""Strategies that draw problems of every operation, dtype and kind of layout, at small sizes."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from gemmtune.problem import Layout, Problem

SIZES = st.sampled_from([1, 2, 3, 7, 8, 16, 17, 33, 65])


@st.composite
def layouts(draw: st.DrawFn, size: tuple[int, ...], dtype: torch.dtype, broadcast: bool = True) -> Layout:
    """Row- or column-major, padded, with gaps, at an offset, expanded, or overlapping."""
    kind = draw(st.sampled_from(["row", "column", "gaps", *(["expanded", "sliding"] if broadcast else [])]))
    rows, cols = size[-2:]
    pad, offset = draw(st.sampled_from([0, 0, 1, 4, 17])), draw(st.integers(0, 16 // dtype.itemsize - 1))
    stride = {
        "row": (cols + pad, 1),
        "column": (1, rows + pad),
        "gaps": (2 * cols + pad, 2),
        "expanded": draw(st.sampled_from([(0, 1), (1, 0), (0, 0)])),
        "sliding": (1, 1),
    }[kind]
    if len(size) == 3:
        whole = (rows - 1) * stride[0] + (cols - 1) * stride[1] + 1
        stride = (draw(st.sampled_from([whole, whole + 3, *([0] if broadcast else [])])), *stride)
    return Layout(size=size, stride=stride, dtype=dtype, offset=offset)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Every dense operation, dtype and kind of layout at small sizes."""
    op = draw(st.sampled_from(["mm", "addmm", "bmm", "baddbmm"]))
    m, n, k, dtype = (
        draw(SIZES),
        draw(SIZES),
        draw(SIZES),
        draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])),
    )
    lead = (draw(st.integers(1, 3)),) if op in ("bmm", "baddbmm") else ()
    with_inp = op in ("addmm", "baddbmm")
    shapes = [(n,), (*lead, m, n), (m, 1), (1, n), ()]
    return Problem(
        op=op,
        a=draw(layouts((*lead, m, k), dtype)),
        b=draw(layouts((*lead, k, n), dtype)),
        out=draw(layouts((*lead, m, n), dtype, broadcast=False)),
        inp=Layout.contiguous(draw(st.sampled_from(shapes)), dtype) if with_inp else None,
        alpha=draw(st.sampled_from(["one", "general", "zero"])) if with_inp else "one",
        beta=draw(st.sampled_from(["one", "general", "zero"])) if with_inp else "zero",
        device_type="cpu",
    )


@st.composite
def narrow_problems(draw: st.DrawFn) -> Problem:
    """int_mm and scaled_mm with every dtype, kind of scale and kind of layout at small sizes."""
    op = draw(st.sampled_from(["int_mm", "scaled_mm"]))
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    if op == "int_mm":
        dtypes, scales = (torch.int8, torch.int8, torch.int32), {}
    else:
        eight = st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2])
        dtypes = (draw(eight), draw(eight), draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])))
        shapes = {"scale_a": draw(st.sampled_from([(), (1,), (1, 1), (m, 1)])), "scale_b": draw(st.sampled_from([(), (1, n)]))}
        scales = {name: Layout.contiguous(shape, torch.float32) for name, shape in shapes.items()}
        scales["fast_accum"] = draw(st.booleans())
    return Problem(
        op=op,
        a=draw(layouts((m, k), dtypes[0])),
        b=draw(layouts((k, n), dtypes[1])),
        out=draw(layouts((m, n), dtypes[2], broadcast=False)),
        device_type="cpu",
        **scales,
    )
