"""A Problem in one line, for tables, logs and messages."""

from __future__ import annotations

from .dtypes import dtype_name
from .fields import ProblemFields
from .layout import Layout

__all__ = ["describe"]


def describe(problem: ProblemFields) -> str:
    """All but strides that are not contiguous, such as ``addmm 16x64x32 bfloat16 nt inp[64] alpha=one beta=one on cuda``."""
    p = problem
    shape = f"{p.batch}x" * p.batched + f"{p.m}x{p.n}x" + (f"{p.k}" if p.c is None else f"({p.k}+{p.k2})")
    parts = [p.op, shape, p.dtype_label, p.layout_letters]
    if p.inp is not None:
        parts += [f"inp[{'x'.join(map(str, p.inp.size))}]", f"alpha={p.alpha}", f"beta={p.beta}"]
    if p.encoding or p.b.dtype != p.a.dtype:
        parts.append(f"b {p.encoding or dtype_name(p.b.dtype)}")
    if p.float8:
        parts.append(f"out {dtype_name(p.out.dtype)}")
    parts += [f"{name}[{_block(p, name)}]" for name in ("scale_a", "scale_b", "zero_b") if getattr(p, name) is not None]
    parts += ["fast_accum"] * p.fast_accum
    if p.epilogue is not None:
        parts.append(f"epilogue={p.epilogue}")
    return " ".join([*parts, *(["prepacked"] * p.prepacked), "on", p.device_type])


def _block(problem: ProblemFields, name: str) -> str:
    """The block that one scale is for, ``-`` for a whole side; ``1`` where there is one scale in all."""
    layout: Layout = getattr(problem, name)
    if layout.numel == 1:
        return "1"
    size = (problem.m, problem.k) if name == "scale_a" else problem.b_size
    block = problem.scale_block(name)
    return "x".join("-" if side >= extent else str(side) for side, extent in zip(block, size, strict=True))
