"""Block-sparse products by dense ones: every choice for the dense problem, on the dense matrix of the blocks."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..choice import Choice, Claims, Kernel, Offers, Scalars, Tensors
from ..device import DeviceInfo
from ..numerics.block_sparse import dense_problem
from ..numerics.block_sparse import densified as blocks_densified
from ..numerics.bounds import FLOAT8_BITS
from ..problem import Problem
from ..problem.dtypes import is_float8
from .around import AroundChoice

__all__ = ["DensifiedChoice", "dense_problem", "densified"]


def densified(problem: Problem, offers: Offers) -> Offers:
    """Return the offers for ``dense_problem(problem)`` as choices for the block-sparse problem."""
    return Offers(choices=tuple(DensifiedChoice.around(problem, choice) for choice in offers.choices), refusals=offers.refusals)


@dataclass(frozen=True, kw_only=True)
class DensifiedChoice(AroundChoice):
    """``inner`` on the dense matrix, which is made in every call or kept as the packed copy of a prepacked weight."""

    step = "dense"

    @staticmethod
    def claimed(problem: Problem, inner: Choice) -> Claims:
        """Return the claims of ``inner``, which multiplies absent blocks too.

        On GPUs, sums of 8-bit floats have as few bits as in a dense product.
        """
        native = inner.problem.float8 and problem.device_type != "cpu"
        bits = FLOAT8_BITS if native and inner.claims.accumulator_bits is None else inner.claims.accumulator_bits
        return replace(inner.claims, skips_absent=False, accumulator_bits=bits)

    @property
    def content_hash(self) -> str:
        """Hash of the inner choice and of the fact that b is made of blocks."""
        return hashlib.sha256(f"{self.inner.content_hash} of blocks".encode()).hexdigest()

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        """Return the dense choice for another number of tokens, or why there is none."""
        inner = self.inner.at(dense_problem(problem), device)
        return inner if isinstance(inner, str) else self.around(problem, inner, baseline=self.baseline)

    def bind(self, loaded: Any) -> Kernel:
        """Bind the dense kernel, preceded by making its b unless b is packed."""
        packed, scaled = self.problem.prepacked, is_float8(self.problem.dtype)
        kernel = self.inner.bind(loaded)
        if packed and not scaled:
            return kernel

        def dense(tensors: Tensors) -> Tensors:
            a, weight, *rest = tensors
            return (a, weight if packed else _dense(weight), *(_scales(a.device) if scaled else ()), *rest)

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
            kernel.run(out, dense(tensors), scalars)

        if kernel.run_new is None:
            return Kernel(run=run)
        fresh = kernel.run_new
        return Kernel(run=run, run_new=lambda tensors, scalars: fresh(dense(tensors), scalars))

    @property
    def packed_format(self) -> str | None:
        """Name of the dense matrix in the format of the dense choice, or None if the weight is not prepacked."""
        return f"dense {self.inner.packed_format or ''}".strip() if self.problem.prepacked else None

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        """Return the dense matrix of a sparse_bsr weight, packed."""
        dense = _dense(b)
        return self.inner.pack(dense) if self.inner.packed_format is not None else dense


def _dense(weight: torch.Tensor) -> torch.Tensor:
    """Return b [K, N], column-major as in dense products."""
    return blocks_densified(weight).t()


@functools.lru_cache(maxsize=16)
def _scales(device: torch.device) -> Tensors:
    """Return the scales of a and b that the dense product of 8-bit floats requires."""
    one = torch.ones(1, device=device)
    return one, one
