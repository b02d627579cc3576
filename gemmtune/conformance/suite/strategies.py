"""Drawing cases with hypothesis: specifications and seeds, never tensors. Smaller and plainer ones come first when it shrinks."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from ..cases.case import Case
from ..cases.scope import Scope
from ..cases.sizes import EDGES, fitting
from ..labels import OPS
from ..layouts import PLAIN, OperandLayout
from ..properties.property import Property

__all__ = ["cases", "layouts"]

LONG_K = (512, 1000, 1024, 2048)
MORE = (0, 0, 0, 0, 1, 2, 3, 5, 9, 13, 21, 34)
"""Added to a size at the edge of a tile."""
MOST_BATCH = 5
MOST_PRODUCTS = 2**23
"""M·N·K of one matrix, so that references stay quick."""
PADS = (0, 0, 1, 4, 8, 17)
MOST_OFFSET = 8


@st.composite
def cases(draw: st.DrawFn, wanted: Property, scope: Scope) -> Case:
    """A case of a property within a scope: one of the enumerated ones with other sizes, strides, dtype and seed."""
    base = draw(st.sampled_from(_bases(wanted, scope)))
    wanted_sizes = (draw(st.sampled_from(edges)) + draw(st.sampled_from(MORE)) for edges in (EDGES, EDGES, EDGES + LONG_K))
    m, n, k = fitting(scope, *wanted_sizes)
    hypothesis.assume(m * n * k <= MOST_PRODUCTS)
    case = base.changed(
        m=m, n=n, k=k,
        batch=draw(st.integers(1, MOST_BATCH)) if base.batched else 1,
        dtype=draw(st.sampled_from(scope.tested_dtypes(base.op))),
        a=draw(layouts(scope, batched=base.batched)),
        b=draw(layouts(scope, batched=base.batched)),
        seed=draw(st.integers(0, 2**16 - 1)),
    )  # fmt: skip
    if case.packed:
        case = case.changed(k=k + k % 2)
    hypothesis.assume(scope.allows(case))
    return case


@st.composite
def layouts(draw: st.DrawFn, scope: Scope, *, batched: bool) -> str:
    """The strides of a or b, of the kinds that a scope has.

    Each kind draws as much as any other: hypothesis takes what draws less for simpler, and would not shrink to plain rows.
    """
    kinds = scope.tested_kinds
    kind = draw(st.sampled_from([k for k in kinds if k not in ("padded", "offset", "batch0", "batchgap")]))
    pad = draw(st.sampled_from(PADS)) if "padded" in kinds else 0
    offset = draw(st.integers(0, MOST_OFFSET)) if "offset" in kinds else 0
    gaps = [""] + [mark for name, mark in (("batchgap", "1"), ("batch0", "0")) if name in kinds]
    return str(
        OperandLayout(
            kind=kind,
            pad=pad if kind in (PLAIN, "col") else 0,
            offset=offset,
            batch=draw(st.sampled_from(gaps)) if batched else "",
        )
    )


def _form(case: Case) -> tuple[str, ...]:
    return case.scales, case.scale_dtype, case.weights, case.zeros, case.result


def _bases(wanted: Property, scope: Scope) -> list[Case]:
    """One enumerated case of each sort, sizes, strides and dtype aside: those are drawn."""
    sorts = {
        (case.op, case.out, case.inp, case.bias, case.alpha, case.beta, *_form(case), case.variant): case
        for case in reversed(list(wanted.cases(scope)))
    }
    return sorted(sorts.values(), key=lambda case: OPS.index(case.op))
