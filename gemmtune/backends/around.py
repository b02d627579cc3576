"""Choices for one problem that consist of a choice for another problem and torch operations around it."""

import functools
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch

from ..choice import Choice, Claims, Kernel, Offers, Scalars, Tensors
from ..device import DeviceInfo
from ..numerics.block_sparse import dense_problem
from ..numerics.block_sparse import densified as blocks_densified
from ..numerics.bounds import FLOAT8_BITS
from ..numerics.routed import by_steps
from ..problem import Problem
from ..problem.dtypes import is_float8
from ..problem.epilogue import evaluate
from ..problem.grouped_compositions import added_by_token, gated_columns


@dataclass(frozen=True, kw_only=True)
class AroundChoice(Choice):
    """``inner`` between torch operations. Compiled code, loaded code and launch parameters are those of ``inner``."""

    step: ClassVar[str]
    """Suffix of the name, and the flag in ``info``, that distinguish it from ``inner``."""
    inner: Choice = field(repr=False)

    @classmethod
    def around(cls, problem: Problem, inner: Choice, *, baseline: bool = False) -> Self:
        """Return the choice that solves ``problem`` with ``inner``."""
        return cls(
            name=f"{inner.name}+{cls.step}",
            backend=inner.backend,
            problem=problem,
            claims=cls.claimed(problem, inner),
            info={**inner.info, cls.step: True},
            baseline=baseline,
            inner=inner,
        )

    @staticmethod
    @abstractmethod
    def claimed(problem: Problem, inner: Choice) -> Claims:
        """Return the claims of ``inner`` together with the steps around it."""

    @property
    def compile_key(self) -> str | None:
        return self.inner.compile_key

    @property
    def compiled(self) -> bool:
        return self.inner.compiled

    @property
    def obstacle(self) -> str | None:
        return self.inner.obstacle

    def compile(self) -> None:
        self.inner.compile()

    def compilation(self) -> Callable[[], object]:
        return self.inner.compilation()

    def load(self) -> Any:
        return self.inner.load()

    def launch_variants(self) -> Sequence[Choice]:
        return [self.around(self.problem, variant) for variant in self.inner.launch_variants()]


def densified(problem: Problem, offers: Offers) -> Offers:
    """Return the offers for ``dense_problem(problem)`` as choices for the block-sparse problem."""
    return Offers(choices=tuple(DensifiedChoice.around(problem, choice) for choice in offers.choices), refusals=offers.refusals)


@dataclass(frozen=True, kw_only=True)
class DensifiedChoice(AroundChoice):
    """``inner`` on the dense matrix, which is made in every call or kept as the packed copy of a prepacked weight."""

    step = "dense"

    @staticmethod
    def claimed(problem: Problem, inner: Choice) -> Claims:
        """Return the claims of ``inner``, which multiplies absent blocks too. On GPUs, sums of 8-bit floats have few bits."""
        native = inner.problem.float8 and problem.device_type != "cpu"
        bits = FLOAT8_BITS if native and inner.claims.accumulator_bits is None else inner.claims.accumulator_bits
        return replace(inner.claims, skips_absent=False, accumulator_bits=bits)

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(f"{self.inner.content_hash} of blocks".encode()).hexdigest()

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
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


BY_INDEX = ("routed_grouped_mm", "combined_grouped_mm")
"""Operations that are a plain grouped product with steps before or after it."""
MOST_OF_EACH = 4
"""Largest number of plain products of one backend that are tried with steps."""


def with_steps(problem: Problem, own: Offers, plain: Offers) -> Offers:
    """Return a backend's offers and its first few for ``grouped_problem(problem)``, whose refusals count if only it has choices."""
    around = tuple(RoutedChoice.around(problem, choice) for choice in plain.choices[:MOST_OF_EACH])
    refusals = plain.refusals if around and not own.choices else own.refusals
    return Offers(choices=(*own.choices, *around), refusals=refusals)


@dataclass(frozen=True, kw_only=True)
class RoutedChoice(AroundChoice):
    """``inner`` on rows that torch picked. torch then gates its result, or weights and adds up the rows."""

    step = "routed"

    @staticmethod
    def claimed(problem: Problem, inner: Choice) -> Claims:
        """Return the claims of ``inner`` with a rounding to the dtype of the operands in each step."""
        if problem.weights is None and not problem.gated:
            return replace(inner.claims, epilogue_input=problem.dtype)  # the rows are rounded before an epilogue
        return by_steps(problem, inner.claims)

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(f"{self.inner.content_hash} routed {self.problem.epilogue is not None}".encode()).hexdigest()

    def bind(self, loaded: Any) -> Kernel:
        product, problem, plain = self.inner.bind(loaded).run, self.problem, self.inner.problem
        count = len(problem.operands)

        def run_new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:  # noqa: ARG001
            a, b, offs, *rest = tensors[:count]
            x = a if problem.rows is None else a.index_select(0, rest[0])
            result = x.new_empty(plain.out.size)
            product(result, (x, b, offs), ())
            if problem.gated:
                result = gated_columns(result, problem.gated)
            if problem.weights is not None:
                result = added_by_token(result, offs, *rest)
            if problem.epilogue is not None:
                result = evaluate(problem.epilogue, result, tensors[count:])
            return result.to(problem.out.dtype)

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
            out.copy_(run_new(tensors, scalars))

        return Kernel(run=run)
