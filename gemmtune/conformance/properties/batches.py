"""Properties of the bits of rows: in batches of other sizes, and by another GEMM that is declared equal."""

import dataclasses
from collections.abc import Iterator

from ...declaration.subject import SubjectSpec, load
from ...numerics.hard_rows import with_hard_rows
from ...numerics.operands import Operands
from ...numerics.some_rows import first_other_row, some_rows
from ..bench.bench import Bench
from ..cases.sampling import Sample
from .calls import SIZES
from .property import Property, declared, stage


def check_batch_invariance(bench: Bench) -> None:
    """Check that the first row, the last row and the first half keep their bits without the other rows."""
    for name, operands in _sets(bench):
        if not _keeps_bits(bench, bench, name, operands):
            return


def check_reduction(bench: Bench) -> None:
    """Check that the GEMM and the one of ``same_bits`` give equal bits, for all rows and for rows in batches of other sizes."""
    target = bench.subject.traits.same_bits
    other = Bench(load(SubjectSpec(target=target)), bench.case, bench.device, examine=bench.examine)
    other.failures = bench.failures
    for name, operands in _sets(bench):
        with stage(bench, f"against {target}"):
            if not _keeps_bits(other, bench, name, operands):
                return


def _sets(bench: Bench) -> Iterator[tuple[str, Operands]]:
    """Yield random operands, then operands with rows on which another order of summation shows."""
    yield "random", dataclasses.replace(bench.probes.random(), extra=bench.extra)
    hard = with_hard_rows(bench.problem, bench.probes.random())
    if hard is not None:
        yield "hard", dataclasses.replace(hard, extra=bench.extra)


def _keeps_bits(whole_of: Bench, bench: Bench, name: str, operands: Operands) -> bool:
    """Return True if ``bench`` gives rows the bits that ``whole_of`` gives them among all rows. Record a failure otherwise."""
    whole = whole_of.call(operands)
    m, traits = bench.problem.m, bench.subject.traits
    unit = traits.multiples[0]
    fewest = max(-(-traits.least[0] // unit), 1) * unit
    half = max(m // 2 // unit * unit, fewest)
    for begin, count in dict.fromkeys(((0, m), (0, fewest), (m - fewest, fewest), (0, half))):
        if count == m and whole_of is bench:
            continue
        part = bench.sibling(m=count)
        given = some_rows(operands, part.problem, begin)
        result = part.call(given)
        row = first_other_row(whole, result, begin)
        if row is None:
            continue
        with stage(bench, f"{name} rows {begin} to {begin + count - 1} without the others"):
            expected = whole[..., begin : begin + count, :]
            if part.expect_equal(result, expected, given, name="the bits among all rows", known=False):
                bench.fail(f"row {row} has the same numbers with another sign of 0, or NaN in other places")
        return False
    return True


# 128 rows that share a scale cannot be separated. Strides of one row say nothing about the others.
_SEPARABLE = Sample(budget=(18, 72, 300), shapes=SIZES, admits=lambda case: case.scales != "block_128x128")
PROPERTIES = (
    Property(
        "batch-invariance", "the bits of a row do not depend on the other rows, nor on their number", check_batch_invariance,
        _SEPARABLE, needs=lambda scope: declared("batch_invariant")(scope) if not scope.traits.reduction else None,
    ),
    Property(
        "reduction", "a row has the bits that the GEMM of same_bits gives it, in batches of any size", check_reduction,
        _SEPARABLE, needs=declared("same_bits"),
    ),
)  # fmt: skip
