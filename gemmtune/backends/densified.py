"""A block-sparse product by a dense one: every choice for the dense problem, given the matrix that the blocks stand for."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..choice import Choice, Claims, Kernel, Offers, RunNew, Scalars, Tensors
from ..device import DeviceInfo
from ..numerics.block_sparse import dense_problem
from ..numerics.block_sparse import densified as blocks_densified
from ..numerics.bounds import FLOAT8_BITS
from ..problem import Problem
from ..problem.dtypes import is_float8
from .around import AroundChoice

__all__ = ["DensifiedChoice", "dense_problem", "densified"]


def densified(problem: Problem, offers: Offers) -> Offers:
    """What was offered for ``dense_problem(problem)`` as choices for the block-sparse one."""
    return Offers(choices=tuple(DensifiedChoice.around(problem, choice) for choice in offers.choices), refusals=offers.refusals)


@dataclass(frozen=True, kw_only=True)
class DensifiedChoice(AroundChoice):
    """``inner`` on the dense matrix: made in every call, or of a prepacked weight kept as its packed copy."""

    step = "dense"

    @staticmethod
    def claimed(problem: Problem, inner: Choice) -> Claims:
        """Absent blocks are multiplied too; on GPUs, sums of 8-bit floats have as few bits as those of a dense product."""
        native = inner.problem.float8 and problem.device_type != "cpu"
        bits = FLOAT8_BITS if native and inner.claims.accumulator_bits is None else inner.claims.accumulator_bits
        return replace(inner.claims, skips_absent=False, accumulator_bits=bits)

    @property
    def content_hash(self) -> str:
        """Over the inner choice, and that its b is made of blocks."""
        return hashlib.sha256(f"{self.inner.content_hash} of blocks".encode()).hexdigest()

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        """The dense choice for another number of tokens."""
        inner = self.inner.at(dense_problem(problem), device)
        return inner if isinstance(inner, str) else self.around(problem, inner, baseline=self.baseline)

    def bind(self, loaded: Any) -> Kernel:
        """The dense kernel, behind the making of its b unless that is packed."""
        kernel = self.inner.bind(loaded)
        run, fresh = kernel.run, kernel.run_new
        if self.problem.prepacked:
            return _scaled(kernel) if is_float8(self.problem.dtype) else kernel

        def run_dense(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
            a, weight, *rest = tensors
            run(out, (a, _dense(weight), *_scales(a), *rest), scalars)

        return Kernel(run=run_dense, run_new=None if fresh is None else _new(fresh))

    @property
    def packed_format(self) -> str | None:
        """The dense matrix, in the format that the dense choice wants."""
        return f"dense {self.inner.packed_format or ''}".strip() if self.problem.prepacked else None

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        """The dense matrix of a sparse_bsr weight, packed."""
        dense = _dense(b)
        return self.inner.pack(dense) if self.inner.packed_format is not None else dense


def _dense(weight: torch.Tensor) -> torch.Tensor:
    """b [K, N], column-major, as dense products have it."""
    return blocks_densified(weight).t()


@functools.lru_cache(maxsize=16)
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, device=device)


def _scales(a: torch.Tensor) -> Tensors:
    """Those of a and b where the dense product of 8-bit floats has to have some."""
    return (_one(a.device), _one(a.device)) if is_float8(a.dtype) else ()


def _scaled(kernel: Kernel) -> Kernel:
    """The dense kernel of 8-bit floats for a packed b."""
    run, fresh = kernel.run, kernel.run_new

    def run_scaled(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
        a, b, *rest = tensors
        run(out, (a, b, *_scales(a), *rest), scalars)

    def new_scaled(tensors: Tensors, scalars: Scalars) -> torch.Tensor:
        assert fresh is not None
        a, b, *rest = tensors
        return fresh((a, b, *_scales(a), *rest), scalars)

    return Kernel(run=run_scaled, run_new=None if fresh is None else new_scaled)


def _new(fresh: RunNew) -> RunNew:
    def run_new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:
        a, weight, *rest = tensors
        return fresh((a, _dense(weight), *_scales(a), *rest), scalars)

    return run_new
