"""What the weights of a problem are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ....problem import Problem
from ....problem.dtypes import dtype_info
from ..hopper import LINE_BYTES

__all__ = ["Factor", "Weights", "weights_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """scale_b or zero_b: its dtype, and how many elements of K share one number; 0: all."""

    dtype: torch.dtype
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How numbers of b are stored, in ``bits`` each, and what they are scaled with. ``signed``: two's complement."""

    bits: int
    signed: bool
    scale: Factor | None = None
    zero: Factor | None = None

    @property
    def chunk(self) -> int:
        """Elements of K in 16 bytes."""
        return 128 // self.bits

    def block_k(self, line_bytes: int = LINE_BYTES) -> int:
        """Elements of K in a line of so many bytes."""
        return line_bytes * 8 // self.bits

    @property
    def factors(self) -> dict[str, Factor]:
        """Scale and zero point, as far as they are given, in the order in which a launch has them."""
        both = {"scale": self.scale, "zero": self.zero}
        return {name: factor for name, factor in both.items() if factor is not None}

    @property
    def along_k(self) -> tuple[Factor, ...]:
        """Those of scale and zero that change along K."""
        return tuple(factor for factor in self.factors.values() if factor.group)


def weights_of(problem: Problem) -> Weights:
    """The weights of a mixed_mm with integers for b."""
    signed = problem.encoding == "int4" if problem.encoding else dtype_info(problem.b.dtype).name == "int8"
    return Weights(
        bits=4 if problem.encoding else 8, signed=signed, scale=_factor(problem, "scale_b"), zero=_factor(problem, "zero_b")
    )


def _factor(problem: Problem, name: Literal["scale_b", "zero_b"]) -> Factor | None:
    layout = problem.scale_b if name == "scale_b" else problem.zero_b
    if layout is None:
        return None
    group = problem.scale_block(name)[0]
    return Factor(dtype=layout.dtype, group=group if group < problem.k else 0)
