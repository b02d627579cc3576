"""Declarations that a GEMM does not keep: every call that needs one is refused, and the same call without it is not.

Undeclared dtypes and layouts may be refused. That must not excuse the refusal of what is declared beside them.
"""

from collections.abc import Hashable, Iterator, Sequence

from ...declaration.layouts import PLAIN
from ...declaration.traits import Traits
from ..bench.outcome import IMPOSSIBLE, Record
from ..cases.case import Case

OPS, EMPTY = "ops=", "empty"
_CALLED = {"threads": "threads", "streams": "streams", "graph-replay": "capturable"}
"""Declarations of how a GEMM can be called, by the property that calls it so."""
_LISTED = {
    "bias": "bias", "scales": "scales", "scale_dtype": "scale_dtypes", "weights": "weights", "result": "results", "gated": "gates",
}  # fmt: skip
"""Declarations that are lists, by the field of a case that has one of their values."""


def refused_declarations(traits: Traits, records: Sequence[Record]) -> Iterator[str]:
    """Yield a complaint for each declaration that was refused in every case, where the GEMM takes the same call without it."""
    done = [record for record in records if record.executed]
    refused = [r for r in records if r.refused and r.outcome and not r.outcome.reason.startswith(IMPOSSIBLE)]
    needed = {record.case: _needed(traits, record.case) for record in (*done, *refused)}
    for declared in dict.fromkeys(name for record in refused for name in needed[record.case]):
        with_it = [record for record in refused if declared in needed[record.case] and record.case.kinds == {PLAIN}]
        without = [record.case for record in done if declared not in needed[record.case]]
        # Another operation, dtype or size may be refused for itself. So each dtype that works without it must have been tried.
        calls, taken = ({_call(case, declared) for case in cases} for cases in ((r.case for r in with_it), without))
        dtypes = {record.case.dtype for record in with_it}
        if any(declared in needed[r.case] for r in done) or not calls & taken or not {case.dtype for case in without} <= dtypes:
            continue
        reason = with_it[0].outcome.reason if with_it[0].outcome else ""
        yield (
            f"{declared}: declared, but each case with it was refused ({len(with_it)}, the first with {reason}), "
            "and not without it; accept it, or do not declare it"
        )


def _needed(traits: Traits, case: Case) -> set[str]:
    """Return the declarations without which a case would not be tested."""
    found = {f"{OPS}{case.op}"} if len(traits.ops or ()) > 1 else set()
    found |= {name for name in ("alpha", "beta") if case.added and getattr(case, name) != "one"}
    found |= {name for name, given in (("out", case.out), ("zeros", case.zeros == "yes"), (EMPTY, case.empty)) if given}
    found |= {_CALLED[case.property_name]} if case.property_name in _CALLED else set()
    words = ((field, getattr(case, field)) for field in _LISTED if field != "bias" or case.added)
    return found | {f"{_LISTED[field]}={word}" for field, word in words if word in getattr(traits, _LISTED[field])}


def _call(case: Case, declared: str) -> Hashable:
    """Return what two cases have in common that may differ in what is declared, in strides, scalars and operands beside a and b."""
    sizes = () if declared == EMPTY else (case.m, case.n, case.k)
    return "" if declared.startswith(OPS) else case.op, case.dtype, sizes, case.blocks
