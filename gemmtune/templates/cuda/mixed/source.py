"""What the texts of the kernels for mixed_mm are made of, but for their shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch

from ....problem import Epilogue, Problem
from ...cpp.printer import STORAGE_TYPES, print_epilogue
from ...launch import MOST_OPERANDS, launch_text
from ...render import template, template_digest
from ..parts import ELEMENTS, MAP_TYPES, common_parts
from .launch import Launch
from .weights import Weights, weights_of

__all__ = ["MOST_SHARED_BYTES", "Asked", "Source", "asked_of", "parts_of"]

FILES = ("reads.cuh.jinja", "work.cuh.jinja", "maps.h.jinja")
MOST_SHARED_BYTES = 227 * 1024
"""Of a block."""
PROMOTION = 256
"""Bytes that L2 asks of memory for a line that it misses."""


class Asked(TypedDict):
    """What a problem asks of a source."""

    weights: Weights
    dtype: torch.dtype
    out_dtype: torch.dtype
    epilogue: Epilogue | None
    operands: tuple[torch.dtype, ...]


def asked_of(problem: Problem) -> Asked:
    """Its fields but for a kernel's shape."""
    epilogue = problem.epilogue
    return Asked(
        weights=weights_of(problem),
        dtype=problem.dtype,
        out_dtype=problem.out.dtype,
        epilogue=epilogue,
        operands=tuple(x.dtype for x in epilogue.operands) if epilogue else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Sizes, strides and the division of K among blocks are arguments of a kernel; everything else makes its text."""

    weights: Weights
    dtype: torch.dtype
    """Of a."""
    out_dtype: torch.dtype
    epilogue: Epilogue | None = None
    """The graph; of its operands only the dtypes matter."""
    operands: tuple[torch.dtype, ...] = ()
    """Of the epilogue's operands."""

    @property
    def statements(self) -> list[str]:
        """The epilogue in C++."""
        if self.epilogue is None:
            return []
        return print_epilogue(self.epilogue, "acc", [f"x{i}" for i in range(len(self.operands))], "result")

    @property
    def values(self) -> dict[str, object]:
        """What templates are given."""
        weights, factors = self.weights, self.weights.factors
        return {
            "most_operands": MOST_OPERANDS,
            "bits": weights.bits,
            "signed": weights.signed,
            "zero": weights.zero is not None,
            "element": ELEMENTS[self.dtype],
            "map_type": MAP_TYPES[self.dtype],
            "out_type": STORAGE_TYPES[self.out_dtype],
            "promotion": PROMOTION,
            "most_shared": MOST_SHARED_BYTES,
            "along_k": [name for name, factor in factors.items() if factor.group],
            "groups": {name: factor.group for name, factor in factors.items()},
            "types": {name: STORAGE_TYPES[factor.dtype] for name, factor in factors.items()},
            "map_types": {name: MAP_TYPES[factor.dtype] for name, factor in factors.items()},
            "places": {name: place for place, name in enumerate(factors)},
            "first_operand": len(factors),
            "count": len(factors) + len(self.operands),
            "operands": [STORAGE_TYPES[dtype] for dtype in self.operands],
            "statements": self.statements,
        }

    @property
    def made_of(self) -> str:
        """What a digest is taken of, beside the kernel's own templates."""
        files = [template_digest(__package__, file) for file in FILES]
        return f"{files} {self} {common_parts()} {self.statements} {launch_text(Launch, 0)} {PROMOTION} {MOST_SHARED_BYTES}"


def parts_of(source: Source) -> dict[str, str]:
    """The parts that the kernels have in common: those of every family, and what a launch tells."""
    launch = launch_text(Launch, len(source.weights.factors) + len(source.operands))
    parts = {file.split(".")[0]: template(__package__, file).render(**source.values) for file in FILES}
    return {**common_parts(fused=source.epilogue is not None), "launch": launch, **parts}
