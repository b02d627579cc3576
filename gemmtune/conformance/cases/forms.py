"""Forms of an operation: the declared kinds of scales, weights, zero points, results, gates and index operands."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...declaration.labels import FLOAT8, ROWS, SCALES_OF, plain_scales, weights_of

if TYPE_CHECKING:
    from ...declaration.traits import Traits
    from .case import Case

_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Fields of a case that choose a form. ``other``: b has the other 8-bit float. ``picks``: an index picks rows of a."""

    scales: str = "tensor"
    scale_dtype: str = ""
    weights: str = ""
    zeros: str = "no"
    result: str = ""
    other: bool = False
    picks: bool = False
    gated: str = ""
    index: str = ""

    @classmethod
    def of(cls, case: Case) -> Form:
        """Return the form that ``case`` has."""
        other = case.row.float8 and bool(case.weights)
        weights, other = "" if other else case.weights, other and case.weights != case.dtype
        return cls(
            scales=case.scales, scale_dtype=case.scale_dtype, weights=weights, zeros=case.zeros, result=case.result, other=other,
            picks=bool(case.tokens), gated=case.gated, index=case.index,
        )  # fmt: skip

    def fields(self, dtype: str, m: int) -> dict[str, Any]:
        """Return the fields of a case in this form. An a of which rows are picked gets as many rows as the case has."""
        return {
            "scales": self.scales, "scale_dtype": self.scale_dtype,
            "weights": FLOAT8[dtype == FLOAT8[0]] if self.other else self.weights, "zeros": self.zeros, "result": self.result,
            "tokens": str(max(m, 1)) if self.picks else "", "gated": self.gated, "index": self.index,
        }  # fmt: skip


PLAIN_FORMS = (Form(),)
"""Forms of an operation that has just one."""


def forms_of(op: str, traits: Traits) -> tuple[Form, ...]:
    """Return the declared forms of an operation, ``PLAIN_FORMS`` if it has no choice, none if no kind that it needs is declared."""
    scales = traits.scales_of(op)
    weights = tuple(word for word in traits.weights if word in weights_of(op))
    ways = tuple(_ways(op, traits.gates, traits.index_dtypes))
    return _forms(op, scales, traits.scale_dtypes, weights, traits.zeros, traits.float8_pairs, traits.results, ways)


@functools.cache
def _forms(
    op: str,
    scales: tuple[str, ...],
    scale_dtypes: tuple[str, ...],
    weights: tuple[str, ...],
    zeros: bool,
    pairs: bool,
    results: tuple[str, ...],
    ways: tuple[tuple[bool, str, str], ...],
) -> tuple[Form, ...]:
    """Return every combination of what the row has and the traits declare, in the order of these arguments."""
    row = ROWS[op]
    kinds = scales if op in SCALES_OF else (plain_scales(op),)
    held = tuple(_unless("int8", word) for word in weights) if row.widens_b else ("",)
    given = tuple(_unless("bfloat16", word) for word in results) if row.names_result else ("",)
    return tuple(
        Form(
            scales=kind, scale_dtype=dtype, weights=word, zeros=zero, result=result, other=other,
            picks=picks, gated=gated, index=index,
        )
        for kind, word in itertools.product(kinds, held)
        for dtype in _scale_dtypes(op, kind, scale_dtypes)
        for zero in ("no",) + ("yes",) * (zeros and kind != "none" and row.operand("zero_b") is not None)
        for result, other in itertools.product(given, (False, True) if pairs and row.float8 else (False,))
        for picks, gated, index in ways
    )  # fmt: skip


def _scale_dtypes(op: str, kind: str, declared: tuple[str, ...]) -> tuple[str, ...]:
    """Return the dtypes of scales: the usual one as "", then declared others that the operation allows."""
    row = ROWS[op]
    if op != row.name:  # a factor, which may have any declared dtype
        return ("", *(name for name in declared if name != "float32"))
    like_a = any(operand.scales and operand.like_a for operand in row.operands)
    return ("",) + ("float32",) * (like_a and "float32" in declared and kind != "none")


def _ways(op: str, gates: tuple[str, ...], indices: tuple[str, ...]) -> Iterator[tuple[bool, str, str]]:
    """Yield (an index picks rows, function of gates, dtype of index operands)."""
    row = ROWS[op]
    words = tuple(_unless("int64", word) for word in indices) if any(operand.indexes for operand in row.operands) else ("",)
    may_pick = row.operand("rows") is not None
    for index in words:
        yield may_pick, "", index
    if "gated" in row.options:
        for gate, picks in itertools.product(gates, (True, False)):
            yield from ((picks, gate, index) for index in (words if picks else ("",)))


def _unless(default: str, word: str) -> str:
    return "" if word == default else word


def form_number(number: int, count: int) -> int:
    """Return an index below ``count``: consecutive numbers visit each once, and neighbours give distant ones."""
    step = max(1, round(count * _GOLDEN))
    while math.gcd(step, count) > 1:
        step += 1
    return number * step % count
