"""Properties of operands in memory: strides of every kind, misaligned pointers, batches, operands that share memory."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from ...declaration.labels import DTYPES, SINGLE
from ...declaration.layouts import OperandLayout
from ...numerics.aliasing import Sharing, can_share, in_one_buffer
from ...problem.operations import BATCHED_OPS
from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.sampling import Pair, Sample, Size
from ..cases.scope import Level, Scope
from ..cases.statement import problem_of
from ..diagnose.match import DIFFERS, FIRST_CALL
from .property import Property, check_once, exact_probe, made, stage, tested

STRIDES = (
    "col", "row+1", "col+1", "every2", "row@1", "col@3", "rows0", "cols0", "window", "row~1", "col~1", "row~0", "col~0",
    "row+4", "col+4", "row+8", "col+8", "row+17", "col+17", "row@2", "col@4", "row@5", "col@6", "row@7", "col@8",
    "row+8@3", "col+4@1~1", "every2+3", "every2@1", "rows0@1", "cols0@2", "window@2", "row+1~0", "col+1@7",
    "every3", "row~i", "col+8~i",
)  # fmt: skip
APART = 7
"""Distance in STRIDES between the layouts of a and b when both vary."""
STRIDE_PAIRS: tuple[Pair, ...] = tuple(
    pair
    for text, apart in zip(STRIDES, STRIDES[APART:] + STRIDES[:APART], strict=True)
    for pair in ((text, "row"), ("row", text), (text, apart))
)
SIZES: tuple[Size, ...] = (
    (64, 64, 64),
    (33, 47, 65),
    (40, 130, 96),
    (1, 72, 48),
    (96, 1, 40),
    (1, 40, 65),
    (65, 1, 33),
    (33, 40, 1),
    (24, 16, 1040),
)
OFFSETS = (1, 4, 2, 7, 3, 8, 5, 6, 12, 15, 9, 10, 11, 13, 14)
"""Offsets of pointers in elements. Only those below 16 bytes are used."""
PADS = (0, 1, 3, 8, 2)
BOUNDARY_BYTES = 16

BATCHES = ({"batch": 1}, {"batch": 2}, {"batch": 17}, {"batch": 5})
BATCH_STRIDES = ("row", "row~0", "col", "row~1", "row~i", "col+8~1", "col~0", "row+1@1~1", "col+8~i")
LARGE_BATCH = 300
MOST_BLOCKS = 65535
"""Limit of a CUDA grid along its second and third dimension. A larger batch needs several launches, or another order."""

SHARED = "wrong where operands share memory"
SHARINGS: dict[str, Sharing] = {"start": "same start", "overlap": "overlapping"}
"""Ways in which operands share memory, by variant."""


def check_relayout(bench: Bench) -> None:
    """Check calls of one size: plain, then the case's strides for a, b, both, then plain. The variant is a dtype in between."""
    case = bench.case
    steps = [("row", "row", case.dtype), (case.a, "row", case.dtype), ("row", case.b, case.dtype), (case.a, case.b, case.dtype)]
    steps += [("row", "row", case.variant), (case.a, case.b, case.variant)] if case.variant else []
    steps.append(("row", "row", case.dtype))
    for number, (a, b, dtype) in enumerate(steps, 1):
        step = bench.sibling(a=a, b=b, dtype=dtype)
        probe = exact_probe(step)
        with stage(bench, f"call {number} of {len(steps)}, {dtype} a {a} b {b}"):
            probe.judge(step, step.call(probe.operands))


def check_sharing(bench: Bench) -> None:
    """Check a, b, c, d and the added operand in one buffer, after the same numbers in separate buffers."""
    problem, how = bench.problem, SHARINGS[bench.case.variant or "start"]
    shared = in_one_buffer(problem, bench.probes.integers(), how, seed=bench.case.seed)
    if problem.a == problem.b and how == "same start":
        shared = dataclasses.replace(shared, b=shared.a)
    copies: dict[str, Any] = {
        name: made(getattr(problem, name), x) for name in ("a", "b", "c", "d", "inp") if (x := getattr(shared, name)) is not None
    }
    apart = dataclasses.replace(shared, **copies)
    if not bench.expect(bench.call(apart), apart, name="operands apart", exact=True):
        return
    noted = len(bench.failures)
    bench.expect(bench.call(shared), shared, name=f"operands in one buffer, {how}", exact=True)
    bench.failures[noted:] = [
        failure
        if failure.diagnosis in (DIFFERS, FIRST_CALL)
        else dataclasses.replace(failure, diagnosis=SHARED, also=(*((failure.diagnosis,) * bool(failure.diagnosis)), *failure.also))
        for failure in bench.failures[noted:]
    ]


def _misaligned_pairs() -> Iterator[Pair]:
    for number, offset in enumerate(OFFSETS):
        first, second = (PADS[(number + i) % len(PADS)] for i in (0, 2))
        row, col = (str(OperandLayout(kind=kind, pad=pad, offset=offset)) for kind, pad in (("row", first), ("col", second)))
        again = str(OperandLayout(kind="row", pad=second, offset=offset))
        yield from ((row, "row"), ("row", row), (again, col), ("row", col), (col, row), (col, "col"))


def _relayouts(case: Case) -> Iterator[Case]:
    for a, b in (("row", "row"), (case.a, "row"), ("row", case.b)):
        yield case.changed(a=a, b=b)
    if case.variant:
        yield case.changed(dtype=case.variant)


def _batches(name: str, scope: Scope) -> Iterable[Case]:
    some = Sample(
        budget=(24, 120, 600),
        shapes=((33, 40, 47), (64, 64, 64), (1, 96, 65), (16, 1, 31)),
        pairs=tuple(itertools.product(BATCH_STRIDES, BATCH_STRIDES)),
        variants=BATCHES,
        ops=BATCHED_OPS,
    )
    large = Sample(budget=(2, 8, 16), shapes=((8, 8, 16),), variants=({"batch": LARGE_BATCH},), ops=BATCHED_OPS)
    repeated = Sample(
        budget=(2, 8, 16),
        shapes=((33, 40, 47), (64, 64, 64)),
        pairs=(("row~0", "row~0"), ("row~0", "col~0"), ("col~0", "row~0")),
        variants=({"batch": 5},),
        ops=BATCHED_OPS,
    )
    many = Sample(budget=(0, 2, 8), shapes=((8, 8, 8),), variants=({"batch": MOST_BLOCKS + 2},), ops=BATCHED_OPS)
    every = (*some(name, scope), *large(name, scope), *repeated(name, scope))
    return (*dict.fromkeys(every), *(many(name, scope) if scope.level >= Level.FULL else ()))


PROPERTIES = (
    Property(
        "layouts", "a and b of any strides: transposed, padded, strided, repeated, overlapping", check_once,
        Sample(budget=(200, 800, 5000), shapes=SIZES, pairs=STRIDE_PAIRS, every_pair=True, ops=SINGLE), drawn=True,
    ),
    Property(
        "alignment", "a and b at addresses and with row lengths that are no multiples of 16 bytes", check_once,
        Sample(
            budget=(72, 360, 2500), shapes=((64, 64, 64), (16, 32, 128), (48, 96, 80), (24, 16, 1040)),
            pairs=tuple(_misaligned_pairs()),
            admits=lambda case: all(
                OperandLayout.parse(text).offset * dtype.itemsize < BOUNDARY_BYTES
                for text, dtype in ((case.a, DTYPES[case.dtype]), (case.b, case.b_dtype))
            ),
        ),
    ),
    Property(
        "relayout", "the same sizes again with other strides, alignment and dtype, and back", check_relayout,
        Sample(
            budget=(18, 200, 1000), shapes=((64, 64, 64), (32, 48, 80)),
            pairs=(("row@1", "row+1"), ("col", "col"), ("row+1", "row@3"), ("every2", "col+1@1"), ("col+8", "every2")),
            variants=lambda scope: ["", *dict.fromkeys(dtype for op in scope.tested_ops for dtype in scope.tested_dtypes(op))],
            admits=lambda case: case.variant != case.dtype, further=_relayouts,
        ),
    ),
    Property(
        "shared-operands", "operands that are views of the same memory, as in mm(x, x) and mm(x, x.t())", check_sharing,
        Sample(
            budget=(36, 100, 400),
            # Most are square, or have M = N, so that b may be a or the transposed a.
            shapes=((64, 64, 64), (33, 33, 65), (48, 48, 48), (96, 40, 65), (65, 65, 65), (1, 40, 33), (40, 40, 128)),
            variants=tuple(SHARINGS),
            admits=lambda case: can_share(problem_of(case, "cpu")),
        ),
    ),
    Property(
        "batch", "each matrix of a batch gets its own product, whatever the batch strides", check_once,
        _batches, needs=tested(BATCHED_OPS, "neither bmm nor baddbmm is tested"), drawn=True,
    ),
)  # fmt: skip
