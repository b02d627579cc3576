"""What the map of errors alone tells: unwritten elements, NaN and infinities out of place, addresses that wrap at 32 bits."""

from __future__ import annotations

import torch

from ...problem import Layout
from ...problem.dtypes import dtype_info
from .evidence import Evidence
from .places import place

__all__ = ["errors_in", "first_sign", "last_sign"]

MOST_TAME = 64.0
"""Products of numbers below this add up to no infinity, not even in float16, for K up to 15; and hardly ever for signed ones."""


def _with_place(text: str, mask: torch.Tensor) -> str:
    """``text`` and where it is so."""
    where = place(mask)
    return f"{text} in {where}" if where else text


def first_sign(evidence: Evidence) -> str:
    """What leaves no doubt, whatever the operands."""
    bad, got, expected = evidence.bad, evidence.got, evidence.expected
    if bool((evidence.unwritten == bad).all()):
        return _with_place("elements left unwritten", bad)
    if _reads_ignored(evidence):
        return "C is read although beta is 0"
    lost = expected.isnan() & ~got.isnan()
    if bool((lost == bad).all()):
        return _with_place("NaN swallowed", lost)
    if bool((_flushed(evidence) == bad).all()):
        return "subnormal numbers became 0"
    return ""


def last_sign(evidence: Evidence) -> str:
    """What is left to say where no bug was found that gives these numbers; empty if nothing."""
    bad, got, expected = evidence.bad, evidence.got, evidence.expected
    largest = dtype_info(evidence.problem.out.dtype).largest
    if bool((evidence.unwritten & bad).any()):
        return _with_place("elements left unwritten", evidence.unwritten & bad)
    for text, mask in (
        ("infinity became the largest finite number", expected.isinf() & (got == largest * expected.sign())),
        ("infinity became NaN", expected.isinf() & got.isnan()),
        ("infinity lost", expected.isinf() & got.isfinite()),
        ("NaN became infinity", expected.isnan() & got.isinf()),
        ("NaN, as if memory outside of the operands were read", _outside(evidence)),
        ("NaN where there should be none", expected.isfinite() & got.isnan()),
        ("overflow to infinity", expected.isfinite() & got.isinf()),
        ("zeros", (got == 0) & expected.isfinite() & (expected != 0)),
    ):
        if bool(mask.any()) and bool((mask == bad).all()):
            return _with_place(text, mask)
    return _wrapped(evidence)


def errors_in(evidence: Evidence) -> str:
    """The place of the errors, where it is one."""
    where = place(evidence.bad)
    return f"errors only in {where}" if where and int(evidence.bad.sum()) > 1 else ""


def _reads_ignored(evidence: Evidence) -> bool:
    """NaN or infinities exactly where the added operand has them, which beta = 0 forbids to read."""
    inp = evidence.operands.inp
    if evidence.problem.beta != "zero" or inp is None or not inp.numel():
        return False
    special = ~inp.expand(evidence.problem.out.size).isfinite().reshape(evidence.bad.shape)
    spoilt = evidence.bad & ~evidence.got.isfinite()
    forbidden = special & evidence.expected.isfinite()
    return bool(special.any()) and bool((spoilt == forbidden).all()) and bool((spoilt == evidence.bad).all())


def _outside(evidence: Evidence) -> torch.Tensor:
    """NaN out of numbers whose sums are far from overflow: around the operands there is nothing but NaN."""
    operands = evidence.operands
    tame = all(bool((x.double().abs() < MOST_TAME).all()) for x in (operands.a, operands.b))
    return evidence.got.isnan() & evidence.expected.isfinite() & tame


def _flushed(evidence: Evidence) -> torch.Tensor:
    least = dtype_info(evidence.problem.out.dtype).smallest_normal
    return (evidence.got == 0) & (evidence.expected != 0) & (evidence.expected.abs() < least)


def _wrapped(evidence: Evidence) -> str:
    """Errors from the row or column on at which the offsets of an operand pass 2^31 or 2^32, and nowhere before it."""
    problem, bad = evidence.problem, evidence.bad
    lines = {"a": (bad.any(-1).any(0), 0), "b": (bad.any(-2).any(0), 1)}
    for name, layout in (("a", problem.a), ("b", problem.b), ("out", problem.out)):
        for wrong, dim in (lines[name],) if name in lines else lines.values():
            first = int(wrong.to(torch.uint8).argmax())
            for unit, itemsize in (("elements", 1), ("bytes", layout.dtype.itemsize)):
                if first and _passes(layout, dim, first, itemsize):
                    line = ("row", "column")[dim]
                    return f"errors from {line} {first} on, where offsets in {name} pass 2^31 {unit}: 32-bit addresses"
    return ""


def _passes(layout: Layout, dim: int, first: int, itemsize: int) -> bool:
    """Whether the line ``first`` is the first one with an offset past 2^31 items."""
    span = 2**31 // itemsize
    rest = layout.span - 1 - (layout.size[-2 + dim] - 1) * layout.stride[-2 + dim]
    ends = [line * layout.stride[-2 + dim] + rest for line in (first - 1, first)]
    return ends[0] < span <= ends[1]
