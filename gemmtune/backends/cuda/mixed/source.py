"""What the texts of the kernels for mixed_mm are given, but for their shapes."""

from __future__ import annotations

from typing import Any

from ....problem import Problem
from ...cpp.printer import STORAGE_TYPES
from ..epilogue import epilogue_values
from ..parameters import Work, structs_of
from ..source import ELEMENTS
from .weights import weights_of

__all__ = ["PTX", "WORK", "mixed_values"]

PTX = (__package__, "ptx.cuh.jinja")
"""The part with the instructions of both kernels."""
WORK = (__package__, "work.cuh.jinja")
"""The part with the maps of operands, and how blocks divide K."""


def mixed_values(problem: Problem, work: type[Work]) -> dict[str, Any]:
    """All that the weights and the epilogue decide."""
    weights, out_type = weights_of(problem), STORAGE_TYPES[problem.out.dtype]
    factors = weights.factors
    return epilogue_values(problem) | {
        "structs": structs_of(work, {"out": f"{out_type}*"}),
        "bits": weights.bits,
        "signed": weights.signed,
        "zero": weights.zero is not None,
        "element": ELEMENTS[problem.dtype],
        "out_type": out_type,
        "along_k": [name for name, factor in factors.items() if factor.group],
        "groups": {name: factor.group for name, factor in factors.items()},
        "types": {name: STORAGE_TYPES[factor.dtype] for name, factor in factors.items()},
        "places": {name: place for place, name in enumerate(factors)},
    }
