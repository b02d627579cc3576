"""Strides and addresses of a and b: every kind, pointers off their boundaries, and one kind after the other."""

from __future__ import annotations

from collections.abc import Iterator

from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.scope import Scope
from ..labels import DTYPES
from ..layouts import OperandLayout
from .coverage import Pair, Sample, Size, fitted
from .probing import exact_probe, stage
from .property import Property

__all__ = ["PROPERTIES"]

STRIDES = (
    "col", "row+1", "col+1", "every2", "row@1", "col@3", "rows0", "cols0", "window", "row~1", "col~1", "row~0", "col~0",
    "row+4", "col+4", "row+8", "col+8", "row+17", "col+17", "row@2", "col@4", "row@5", "col@6", "row@7", "col@8",
    "row+8@3", "col+4@1~1", "every2+3", "every2@1", "rows0@1", "cols0@2", "window@2", "row+1~0", "col+1@7",
)  # fmt: skip
_SIZES: tuple[Size, ...] = ((64, 64, 64), (33, 47, 65), (40, 130, 96), (1, 72, 48), (96, 1, 40))
_APART = 7
"""a and b have different strides at once: each with the one that is so many places further on."""

OFFSETS = (1, 4, 2, 7, 3, 8, 5, 6, 12, 15, 9, 10, 11, 13, 14)
"""In elements; those below 16 bytes count."""
PADS = (0, 1, 3, 8, 2)
BOUNDARY_BYTES = 16
_ALIGNED: tuple[Size, ...] = ((64, 64, 64), (16, 32, 128), (48, 96, 80))


def check_layouts(bench: Bench) -> None:
    """The right elements are read."""
    probe = exact_probe(bench)
    probe.judge(bench, bench.call(probe.operands))


def check_relayout(bench: Bench) -> None:
    """Plain strides first, then the case's, of a, of b, of both, then plain ones again; the sizes stay. The variant is another
    dtype, which comes in between."""
    case = bench.case
    steps = [("row", "row", case.dtype), (case.a, "row", case.dtype), ("row", case.b, case.dtype), (case.a, case.b, case.dtype)]
    steps += [("row", "row", case.variant), (case.a, case.b, case.variant)] if case.variant else []
    steps.append(("row", "row", case.dtype))
    for number, (a, b, dtype) in enumerate(steps, 1):
        step = bench.sibling(a=a, b=b, dtype=dtype)
        probe = exact_probe(step)
        with stage(bench, f"call {number} of {len(steps)}, {dtype} a {a} b {b}"):
            if not probe.judge(step, step.call(probe.operands)):
                return


def _stride_pairs(_: Scope) -> list[Pair]:
    both = list(zip(STRIDES, STRIDES[_APART:] + STRIDES[:_APART], strict=True))
    return [pair for text, apart in zip(STRIDES, both, strict=True) for pair in ((text, "row"), ("row", text), apart)]


def _misaligned_pairs(_: Scope) -> list[Pair]:
    pairs: list[Pair] = []
    for number, offset in enumerate(OFFSETS):
        first, second = (PADS[(number + i) % len(PADS)] for i in (0, 2))
        row, col = (str(OperandLayout(kind=kind, pad=pad, offset=offset)) for kind, pad in (("row", first), ("col", second)))
        again = str(OperandLayout(kind="row", pad=second, offset=offset))
        pairs += [(row, "row"), ("row", row), (again, col), ("row", col), (col, row), (col, "col")]
    return pairs


def _off_boundary(case: Case) -> bool:
    sides = ((case.a, DTYPES[case.dtype]), (case.b, case.b_dtype))
    return all(OperandLayout.parse(text).offset * dtype.itemsize < BOUNDARY_BYTES for text, dtype in sides)


def _relayout_cases(scope: Scope) -> Iterator[Case]:
    def admits(case: Case) -> bool:
        if case.variant and (case.variant == case.dtype or case.variant not in scope.tested_dtypes(case.op)):
            return False
        return all(scope.allows(case.changed(a=a, b=b)) for a, b in (("row", "row"), (case.a, "row"), ("row", case.b)))

    others = dict.fromkeys(dtype for op in scope.tested_ops for dtype in scope.tested_dtypes(op))
    return Sample(
        name="relayout",
        budget=(18, 200, 1000),
        shapes=fitted((64, 64, 64), (32, 48, 80)),
        pairs=lambda _: [("row@1", "row+1"), ("col", "col"), ("row+1", "row@3"), ("every2", "col+1@1"), ("col+8", "every2")],
        variants=("", *others),
        admits=admits,
    )(scope)


PROPERTIES = (
    Property(
        name="layouts",
        meaning="a and b of any strides: transposed, padded, strided, repeated, overlapping",
        check=check_layouts,
        cases=Sample(name="layouts", budget=(180, 800, 5000), shapes=fitted(*_SIZES), pairs=_stride_pairs, every_pair=True),
        drawn=True,
    ),
    Property(
        name="alignment",
        meaning="a and b at addresses and with row lengths that are no multiples of 16 bytes",
        check=check_layouts,
        cases=Sample(
            name="alignment", budget=(72, 360, 2500), shapes=fitted(*_ALIGNED), pairs=_misaligned_pairs, admits=_off_boundary
        ),
    ),
    Property(
        name="relayout",
        meaning="the same sizes again with other strides, alignment and dtype, and back",
        check=check_relayout,
        cases=_relayout_cases,
    ),
)
