"""Random cases of a property, drawn by hypothesis, and the smallest failing one."""

import contextlib
import operator

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from ...declaration.labels import OPS, PLAIN_BLOCKS
from ...declaration.layouts import BATCH_KINDS, PLAIN, OperandLayout
from ..bench.outcome import Record
from ..cases.case import Case
from ..cases.sampling import EDGES, fitting, in_blocks
from ..cases.scope import Scope
from ..properties.property import Property
from ..runs.run import Run

MOST_SHRUNK = 100
"""Cases judged while shrinking to the smallest failing one."""


class _Found(Exception):
    """A drawn case failed."""


def explore(run: Run, wanted: Property) -> list[Record]:
    """Draw cases of a property and return their records: those that did not fail, and the smallest failing one.

    Nothing is drawn if enumerated cases of the property have failed, unless the options set the number of examples.
    """
    if run.established(wanted.name) and run.options.max_examples is None:
        return []
    records: dict[Case, Record] = {}
    smallest: list[Record] = []

    @hypothesis.settings(
        max_examples=run.max_examples,
        derandomize=not run.options.random and run.options.seed is None,
        database=None,
        deadline=None,
        print_blob=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases(wanted, run.scope))
    def attempt(case: Case) -> None:
        # Judge each case once: hypothesis repeats a failing case, and a racing kernel could then give another answer.
        if case not in records:
            if run.ended(wanted.name) is not None or len(records) >= run.max_examples + MOST_SHRUNK:
                return  # count new cases as right, which ends the shrinking
            records[case] = run.judge(case, drawn=True)
        if records[case].refused and run.replaces_refused:
            hypothesis.reject()  # another case is drawn for it
        if records[case].failed or records[case].surprise:
            smallest[:] = [records[case]]
            raise _Found

    if run.options.seed is not None:
        attempt = hypothesis.seed(run.options.seed)(attempt)
    # _Found has its record already. Unsatisfiable means that no case can be drawn within the declarations.
    with contextlib.suppress(_Found, hypothesis.errors.Unsatisfiable):
        attempt()
    return [record for record in records.values() if not (record.failed or record.surprise)] + smallest


LONG_K = (512, 1000, 1024, 2048)
MORE = (0, 0, 0, 0, 1, 2, 3, 5, 9, 13, 21, 34)
"""Amounts added to a size at the edge of a tile."""
MOST_BATCH = 5
MOST_PRODUCTS = 2**23
"""Maximum M·N·K of one matrix. It keeps references quick."""
PADS = (0, 0, 1, 4, 8, 17)
MOST_OFFSET = 8


@st.composite
def cases(draw: st.DrawFn, wanted: Property, scope: Scope) -> Case:
    """Draw a case of a property within a scope: an enumerated case with other sizes, strides, dtype and seed."""
    fields = operator.attrgetter(
        "op", "out", "blocks", "inp", "bias", "alpha", "beta", "scales", "scale_dtype", "weights", "zeros", "result", "variant"
    )  # fields that are not drawn: the first case with each combination of them is a base
    bases = {fields(case): case for case in reversed(list(wanted.cases(scope)))}
    base = draw(st.sampled_from(sorted(bases.values(), key=lambda case: OPS.index(case.op))))
    wanted_sizes = (draw(st.sampled_from(edges)) + draw(st.sampled_from(MORE)) for edges in (EDGES, EDGES, EDGES + LONG_K))
    m, n, k = fitting(scope, *wanted_sizes)
    if base.row.sparse:
        n, k = in_blocks(base.blocks or PLAIN_BLOCKS, n, k)
    hypothesis.assume(m * n * k <= MOST_PRODUCTS)
    case = base.changed(
        m=m, n=n, k=k,
        batch=draw(st.integers(1, MOST_BATCH)) if base.batched else 1,
        dtype=draw(st.sampled_from(scope.tested_dtypes(base.op))),
        a=draw(layouts(scope, batched=base.batched)),
        b=PLAIN if base.row.sparse else draw(layouts(scope, batched=base.batched)),
        seed=draw(st.integers(0, 2**16 - 1)),
    )  # fmt: skip
    if case.packed:
        case = case.changed(k=k + k % 2)
    hypothesis.assume(scope.allows(case))
    return case


@st.composite
def layouts(draw: st.DrawFn, scope: Scope, *, batched: bool) -> str:
    """Draw strides among a scope's kinds. Each draws as many values: Hypothesis takes fewer draws for simpler."""
    kinds = scope.tested_kinds
    kind = draw(st.sampled_from([k for k in kinds if k not in ("padded", "offset", *BATCH_KINDS.values())]))
    pad = draw(st.sampled_from(PADS)) if "padded" in kinds else 0
    offset = draw(st.integers(0, MOST_OFFSET)) if "offset" in kinds else 0
    marks = ["", *(mark for mark in "10i" if BATCH_KINDS[mark] in kinds and (mark != "i" or kind in (PLAIN, "col")))]
    batch = draw(st.sampled_from(marks)) if batched else ""
    return str(OperandLayout(kind=kind, pad=pad if kind in (PLAIN, "col") else 0, offset=offset, batch=batch))
