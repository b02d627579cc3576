"""What the weights of a problem are, and what a launch of a kernel for them is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ....problem import Problem
from ....problem.dtypes import dtype_info
from ...cpp.printer import STORAGE_TYPES
from ..hopper import LINE_BYTES


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
    def values(self) -> dict[str, Any]:
        """What texts are given of the weights: of each factor whether it changes along K, its type, and its place in a launch."""
        factors = self.factors
        return {
            "bits": self.bits,
            "signed": self.signed,
            "zero": self.zero is not None,
            "along_k": [name for name, factor in factors.items() if factor.group],
            "groups": {name: factor.group for name, factor in factors.items()},
            "types": {name: STORAGE_TYPES[factor.dtype] for name, factor in factors.items()},
            "places": {name: place for place, name in enumerate(factors)},
        }

    def stage_bytes(self, block_m: int, block_n: int, line_bytes: int = LINE_BYTES) -> int:
        """The size of a stage with so many bytes of each column: weights, rows of a, and what changes along K."""
        block_k = self.block_k(line_bytes)
        grouped = [factor for factor in self.factors.values() if factor.group]
        more = (max(block_k // x.group, 1) * block_n * x.dtype.itemsize for x in grouped)
        return line_bytes * block_n + 2 * block_m * block_k + sum(-(-count // 128) * 128 for count in more)


def weights_of(problem: Problem) -> Weights:
    """The weights of a mixed_mm with integers for b."""
    factors = {}
    for name, layout in (("scale_b", problem.scale_b), ("zero_b", problem.zero_b)):
        if layout is not None:
            group = problem.scale_block(name)[0]
            factors[name[:-2]] = Factor(dtype=layout.dtype, group=group if group < problem.k else 0)
    signed = problem.encoding == "int4" if problem.encoding else dtype_info(problem.b.dtype).name == "int8"
    return Weights(bits=4 if problem.encoding else 8, signed=signed, **factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedConfig:
    """``cluster_k`` blocks of a cluster divide K; with ``interleaved_k`` step by step rather than a piece of it each.

    ``pdl``: the launch may begin before the one before it has ended; ``prefetch_stages`` are then asked into L2 meanwhile.
    """

    shape: Any
    cluster_k: int = 1
    interleaved_k: bool = False
    pdl: bool = False
    prefetch_stages: int = 0

    def label(self, weights: Weights) -> str:
        """A name such as ``i4_16x128x256_s4_w2x2_k2_interleaved_pdl4``."""
        overlap = f"_pdl{self.prefetch_stages or ''}" if self.pdl else ""
        interleaved = "_interleaved" if self.interleaved_k else ""
        return f"i{weights.bits}_{self.shape.label(weights)}_k{self.cluster_k}{interleaved}{overlap}"
