"""What the texts of the kernels for mixed_mm are made of, but for their shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypedDict

import torch

from ....problem import Epilogue, Problem
from ....toolchain.render import template_digest
from ...cpp.printer import STORAGE_TYPES, print_epilogue
from ..parts import ELEMENTS, MAP_TYPES
from ..source import KernelSource
from .launch import Launch
from .weights import Weights, weights_of

__all__ = ["MOST_SHARED_BYTES", "Asked", "MixedSource", "asked_of"]

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
class MixedSource(KernelSource):
    """The division of K among blocks is an argument of a kernel, as are sizes and strides."""

    LAUNCH: ClassVar = Launch

    weights: Weights
    dtype: torch.dtype
    """Of a."""
    out_dtype: torch.dtype
    epilogue: Epilogue | None = None
    """The graph; of its operands only the dtypes matter."""
    operands: tuple[torch.dtype, ...] = ()
    """Of the epilogue's operands."""

    @property
    def asked(self) -> dict[str, object]:
        """Of what the templates are given, what a kernel's shape has no part in."""
        weights, factors = self.weights, self.weights.factors
        return {
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
            "count": self.passed,
            "operands": [STORAGE_TYPES[dtype] for dtype in self.operands],
            "statements": self._statements(),
        }

    def _statements(self) -> list[str]:
        if self.epilogue is None:
            return []
        return print_epilogue(self.epilogue, "acc", [f"x{i}" for i in range(len(self.operands))], "result")

    @property
    def passed(self) -> int:
        """Scale and zero point, and the epilogue's operands."""
        return len(self.weights.factors) + len(self.operands)

    @property
    def fused(self) -> bool:
        """An epilogue is applied."""
        return self.epilogue is not None

    @property
    def shared(self) -> dict[str, str]:
        """How scales and operands are read, steps of K, and maps of scales."""
        return {file.split(".")[0]: self.part(__package__, file) for file in FILES}

    @property
    def made_of(self) -> str:
        """Its fields, and what they do not tell."""
        files = [template_digest(__package__, file) for file in FILES]
        return f"{files} {self} {self._statements()} {PROMOTION} {MOST_SHARED_BYTES}"
