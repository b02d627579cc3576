"""Strategies that draw problems of every operation, dtype and kind of layout, at small sizes."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from gemmtune.problem import Layout, Problem
from gemmtune.problem.scales import BLOCKS_OF_A, BLOCKS_OF_B, BLOCKS_OF_WEIGHTS, Blocks, scale_shapes

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
        k = draw(st.sampled_from([k, 127, 129, 300]))
        eight = st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2])
        dtypes = (draw(eight), draw(eight), draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])))
        scales = {
            "scale_a": draw(scale_layouts((m, k), BLOCKS_OF_A, torch.float32)),
            "scale_b": draw(scale_layouts((k, n), BLOCKS_OF_B, torch.float32)),
            "fast_accum": draw(st.booleans()),
        }
    return Problem(
        op=op,
        a=draw(layouts((m, k), dtypes[0])),
        b=draw(layouts((k, n), dtypes[1])),
        out=draw(layouts((m, n), dtypes[2], broadcast=False)),
        device_type="cpu",
        **scales,
    )


@st.composite
def mixed_problems(draw: st.DrawFn) -> Problem:
    """mixed_mm with every dtype, encoding, kind of scale and kind of layout at small sizes. out has the dtype of a."""
    m, n, k = draw(SIZES), draw(SIZES), draw(st.sampled_from([1, 2, 7, 33, 64, 97, 130, 300]))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    encoding = draw(st.sampled_from(["", "", "int4", "uint4"]))
    k += k % 2 if encoding else 0
    wide = st.sampled_from([torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
    scale = zero = None
    if draw(st.sampled_from([True, True, True, False])):
        kinds = st.sampled_from([torch.float32, dtype])
        scale = draw(scale_layouts((k, n), BLOCKS_OF_WEIGHTS, draw(kinds)))
        zero = draw(st.sampled_from([None, scale, draw(scale_layouts((k, n), BLOCKS_OF_WEIGHTS, draw(kinds)))]))
    return Problem(
        op="mixed_mm",
        a=draw(layouts((m, k), dtype)),
        b=draw(layouts((k // 2, n), torch.uint8) if encoding else layouts((k, n), draw(wide))),
        out=draw(layouts((m, n), dtype, broadcast=False)),
        scale_b=scale,
        zero_b=zero,
        encoding=encoding,
        device_type="cpu",
    )


@st.composite
def scale_layouts(draw: st.DrawFn, size: tuple[int, int], blocks: Blocks, dtype: torch.dtype) -> Layout:
    """A scale of one element or of any legal block of an operand, in any layout."""
    shape = draw(st.sampled_from([(), (1,), *scale_shapes(size, blocks)]))
    return draw(layouts(shape, dtype)) if len(shape) == 2 else Layout.contiguous(shape, dtype)
