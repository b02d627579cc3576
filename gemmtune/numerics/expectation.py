"""What the result of one call must be: exactly, within a few roundings of single products, or within the bound of sums.

==============  ==================================================================================================================
``OneHotExpectation``      the elements that a probe picks, bit for bit; with ``scaled``, within the bound for one product
``Referenced``  float64 products of all of the result or of samples, within the bound of the claimed arithmetic; ``integers``,
                whose sums are small enough for it, exactly
==============  ==================================================================================================================

An expectation does not depend on the claims of a GEMM: one serves all choices of a problem. ``Judge`` holds results to it.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ..problem import Problem
from ..problem.dtypes import dtype_info
from .block_sparse import parts as parts_of
from .bounds import LOSES_PARTS, Bound, Claims, accumulation_bound, epilogue_input, exact_limit
from .one_hot import OneHotProbe
from .operands import Operands
from .propagate import Approximate, rounded
from .reference import Reference, Region, extended_reference, reference, regions


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a region of the result must be. ``sums(batches, rows)`` are float64, before the epilogue and the last rounding."""

    region: Region
    sums: Callable[[slice, slice], Approximate]
    equal: Callable[[slice, slice], torch.Tensor] | None = None
    """The result itself in the accumulator's dtype, where out has exactly that and no epilogue comes before it."""


@dataclass(frozen=True, kw_only=True)
class Expectation(ABC):
    """Operands of a call and what its result must be."""

    name: str
    operands: Operands

    @abstractmethod
    def parts(self, problem: Problem, claims: Claims) -> Iterator[Part]:
        """What regions of the result must be by the claimed arithmetic. Waits for the device where sums may be flushed."""

    def of_first_rows(self, m: int) -> Expectation:  # noqa: ARG002 - for those that sample
        """What the first ``m`` rows of the result must be."""
        return self

    def origin(self, index: tuple[int, ...], *, batched: bool) -> str:  # noqa: ARG002 - for those that pick
        """Which element of an operand ``out[index]`` is, for messages; "" where it is none."""
        return ""

    @functools.cached_property
    def _beside_subnormal(self) -> float:
        return self.operands.beside_subnormal()

    @functools.cached_property
    def _beside_small_parts(self) -> float:
        return self.operands.beside_subnormal(below=LOSES_PARTS)

    def _bound(
        self, problem: Problem, claims: Claims, *, extended: bool = False, terms: int | None = None, alpha: float | None = None
    ) -> Bound:
        alpha = alpha if alpha is not None else self.operands.alpha if terms is None else 1.0

        def largest() -> float:
            return self._beside_small_parts if claims.input_mode == "parts" else self._beside_subnormal

        return accumulation_bound(problem, claims, alpha=alpha, largest=largest, extended=extended, terms=terms)


@dataclass(frozen=True, kw_only=True)
class OneHotExpectation(Expectation):
    """The elements that a probe picks."""

    probe: OneHotProbe
    scaled: bool = False
    """Scales are any numbers: each product is rounded a few times."""

    @classmethod
    def of(cls, probe: OneHotProbe, *, scaled: bool = False) -> OneHotExpectation:
        """What the result for the probe's operands must be."""
        return cls(name=probe.name, operands=probe.operands, probe=probe, scaled=scaled)

    def parts(self, problem: Problem, claims: Claims) -> Iterator[Part]:
        """All of the result at once."""
        probe = self.probe
        if self.scaled:
            bound = self._bound(problem, claims, terms=1)

            def bounded(batches: slice, rows: slice) -> Approximate:
                return Approximate(value=probe.exact(batches, rows, torch.float64), error=bound(probe.magnitude(batches, rows)))

            yield Part(region=Region(), sums=bounded)
            return

        def exact(batches: slice, rows: slice) -> Approximate:
            acc = Approximate.exactly(probe.exact(batches, rows, torch.float64))
            return acc if problem.epilogue is None else rounded(acc, epilogue_input(problem, claims), flush=False)

        # Whether out is the sums as they are: every element of a and b fits it. Of the quantized operations out may be narrower.
        fits = not problem.widens_b or dtype_info(problem.out.dtype).exact_integer >= dtype_info(problem.dtype).exact_integer
        equal = functools.partial(probe.exact, dtype=problem.accumulator) if fits and problem.epilogue is None else None
        yield Part(region=Region(), sums=exact, equal=equal)

    def origin(self, index: tuple[int, ...], *, batched: bool) -> str:
        """The element that the probe picks for ``out[index]``."""
        return self.probe.origin(index, batched=batched)


@dataclass(frozen=True, kw_only=True)
class Referenced(Expectation):
    """Products in float64 of all of the result, or of samples of it."""

    references: tuple[Reference, ...]
    integers: bool = False

    def parts(self, problem: Problem, claims: Claims) -> Iterator[Part]:
        """One for each reference."""
        for known, largest_sum in zip(self.references, self._largest_sums, strict=True):
            bound = self._bound_of_region(problem, claims, known)
            if self.integers and largest_sum <= exact_limit(problem, claims):
                bound = replace(bound, relative=0.0, absolute=0.0)

            def sums(batches: slice, rows: slice, known: Reference = known, bound: Bound = bound) -> Approximate:
                return Approximate(value=known.value[batches, rows], error=bound(known.magnitude[batches, rows]))

            yield Part(region=known.region, sums=sums)

    def of_first_rows(self, m: int) -> Referenced:
        """Those of the sampled rows that are among them."""
        return replace(self, references=tuple(x.of_first_rows(m) for x in self.references))

    def _bound_of_region(self, problem: Problem, claims: Claims, known: Reference) -> Bound:
        """The bound of sums over K; of a block-sparse b that of each column, over the blocks that it has."""
        weight, sparsity = self.operands.weight, problem.sparsity
        if weight is None or sparsity is None:
            return self._bound(problem, claims, extended=known.extended)
        blocks = parts_of(weight)[1].diff().long()
        if known.region.cols is not None:
            blocks = blocks[known.region.cols // sparsity.block_n]
        else:
            blocks = blocks.repeat_interleave(sparsity.block_n)
        counts, which = blocks.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        bounds = [
            self._bound(problem, claims, extended=known.extended, terms=int(count) * sparsity.block_k, alpha=self.operands.alpha)
            for count in counts.tolist()
        ]
        relative, absolute = (
            torch.tensor([getattr(x, name) for x in bounds], dtype=torch.float64, device=which.device)[which]
            for name in ("relative", "absolute")
        )
        return Bound(relative=relative, absolute=absolute)

    @functools.cached_property
    def _largest_sums(self) -> tuple[float, ...]:
        """max S of each reference, as far as it matters: for integers, whose sums may be exact."""
        return tuple(float(x.magnitude.max()) if self.integers and x.magnitude.numel() else 0.0 for x in self.references)


def referenced(problem: Problem, operands: Operands, *, name: str, integers: bool = False) -> Referenced:
    """The product of ``operands`` in float64, of samples where the problem is large; for float64 results also a better one."""
    shape = (problem.batch, problem.m, problem.n, problem.terms)
    references = [reference(operands, region) for region in regions(*shape, operands.a.device)]
    if problem.dtype == torch.float64 and not integers:
        references.append(extended_reference(operands, *shape))
    return Referenced(name=name, operands=operands, references=tuple(references), integers=integers)
