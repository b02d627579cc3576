"""Weights of a mixed_mm problem, and launch parameters of all mixed kernels."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from ....problem import Problem
from ....problem.dtypes import dtype_info
from ...cpp.printer import STORAGE_TYPES
from ..hopper import LINE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """scale_b or zero_b: dtype, and elements of K that share one number (0: all of K)."""

    dtype: torch.dtype
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Storage of b in ``bits`` per number, with scale and zero point. ``signed``: two's complement."""

    bits: int
    signed: bool
    scale: Factor | None = None
    zero: Factor | None = None

    @property
    def chunk(self) -> int:
        """Elements of K in 16 bytes."""
        return 128 // self.bits

    def block_k(self, line_bytes: int = LINE_BYTES) -> int:
        """Return the elements of K in a line of ``line_bytes``."""
        return line_bytes * 8 // self.bits

    @property
    def factors(self) -> dict[str, Factor]:
        """Given factors, scale before zero point. This is their order in a launch."""
        both = {"scale": self.scale, "zero": self.zero}
        return {name: factor for name, factor in both.items() if factor is not None}

    @property
    def values(self) -> dict[str, Any]:
        """Template values of the weights: for each factor its group along K, C++ type and index among the operands."""
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
        """Return the bytes of a stage: weights, rows of a, and factors that change along K."""
        block_k = self.block_k(line_bytes)
        grouped = [factor for factor in self.factors.values() if factor.group]
        more = (max(block_k // x.group, 1) * block_n * x.dtype.itemsize for x in grouped)
        return line_bytes * block_n + 2 * block_m * block_k + sum(-(-count // 128) * 128 for count in more)


@functools.lru_cache(maxsize=256)
def weights_of(problem: Problem) -> Weights:
    factors = {}
    for name, layout in (("scale_b", problem.scale_b), ("zero_b", problem.zero_b)):
        if layout is not None:
            group = problem.scale_block(name)[0]
            factors[name[:-2]] = Factor(dtype=layout.dtype, group=group if group < problem.k else 0)
    signed = problem.encoding == "int4" if problem.encoding else dtype_info(problem.b.dtype).name == "int8"
    return Weights(bits=4 if problem.encoding else 8, signed=signed, **factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedConfig:
    """Shape plus launch parameters.

    The ``cluster_k`` blocks of a cluster divide K into contiguous parts, or with ``interleaved_k`` step by step. ``pdl``: the
    launch may begin before the previous one ends, and prefetches its first ``prefetch_stages`` into L2.
    """

    shape: Any
    cluster_k: int = 1
    interleaved_k: bool = False
    pdl: bool = False
    prefetch_stages: int = 0

    @property
    def cluster(self) -> int:
        return self.cluster_k

    def label(self, weights: Weights) -> str:
        """Return a name such as ``i4_16x128x256_s4_w2x2_k2_interleaved_pdl4``."""
        overlap = f"_pdl{self.prefetch_stages or ''}" if self.pdl else ""
        interleaved = "_interleaved" if self.interleaved_k else ""
        return f"i{weights.bits}_{self.shape.label(weights)}_k{self.cluster_k}{interleaved}{overlap}"
