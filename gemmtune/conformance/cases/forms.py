"""Forms of a quantized operation: the declared kinds of scales, weights, zero points and results."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...declaration.labels import FLOAT8, ROWS, SCALES_OF

if TYPE_CHECKING:
    from ...declaration.traits import Traits
    from .case import Case

_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Fields of a case that describe its quantization. ``other`` means that b of scaled_mm has the 8-bit float that a has not."""

    scales: str = "tensor"
    scale_dtype: str = ""
    weights: str = ""
    zeros: str = "no"
    result: str = ""
    other: bool = False

    def fits(self, case: Case) -> bool:
        """Return True if ``case`` has this form."""
        other = case.row.float8 and bool(case.weights)
        weights, other = "" if other else case.weights, other and case.weights != case.dtype
        return self == Form(
            scales=case.scales, scale_dtype=case.scale_dtype, weights=weights, zeros=case.zeros, result=case.result, other=other
        )

    def of(self, case: Case) -> Case:
        """Return ``case`` in this form."""
        weights = FLOAT8[case.dtype == FLOAT8[0]] if self.other else self.weights
        return case.changed(scales=self.scales, scale_dtype=self.scale_dtype, weights=weights, zeros=self.zeros, result=self.result)


def forms_of(op: str, traits: Traits) -> tuple[Form, ...]:
    """Return the forms that an operation may have: one empty form if it is dense, none if no kind of scales is declared."""
    if op not in SCALES_OF:
        return (Form(),)
    scales = tuple(word for word in SCALES_OF[op] if word in traits.scales)
    return _combined(op, scales, traits.scale_dtypes, traits.weights, traits.zeros, traits.float8_pairs, traits.results)


@functools.cache
def _combined(
    op: str,
    scales: tuple[str, ...],
    scale_dtypes: tuple[str, ...],
    weights: tuple[str, ...],
    zeros: bool,
    pairs: bool,
    results: tuple[str, ...],
) -> tuple[Form, ...]:
    if ROWS[op].integers:
        others = ("", *(name for name in scale_dtypes if name != "float32"))
        return tuple(Form(scales=kind, scale_dtype=dtype) for kind, dtype in itertools.product(scales, others))
    if ROWS[op].widens_b:
        return tuple(
            Form(scales=kind, scale_dtype=dtype, weights=_unless("int8", held), zeros=zero)
            for kind, held in itertools.product(scales, weights)
            for dtype in ("",) + ("float32",) * ("float32" in scale_dtypes and kind != "none")
            for zero in ("no",) + ("yes",) * (zeros and kind != "none")
        )
    return tuple(
        Form(scales=kind, result=_unless("bfloat16", result), other=other)
        for kind, result, other in itertools.product(scales, results, (False, True) if pairs else (False,))
    )


def _unless(default: str, word: str) -> str:
    return "" if word == default else word


def form_number(number: int, count: int) -> int:
    """Return the index of the ``number``-th form among ``count``.

    ``count`` consecutive numbers visit each index once, and neighbouring numbers give distant indices.
    """
    step = max(1, round(count * _GOLDEN))
    while math.gcd(step, count) > 1:
        step += 1
    return number * step % count
