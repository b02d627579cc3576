"""Expected result of one call: exact, within a few roundings of single products, or within the bound of sums.

==============  ==================================================================================================================
``OneHotExpectation``      elements that a probe picks, bit for bit; with ``scaled``, within the bound for one product
``Referenced``  float64 products of all of the result or of samples, within the bound of the claimed arithmetic; with ``integers``
                exact, if the sums are small enough
==============  ==================================================================================================================

An expectation does not depend on the claims of a GEMM, so one serves all choices of a problem. ``Judge`` compares
results with it.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ..problem import Problem
from ..problem.dtypes import dtype_info
from ..problem.sparsity import Sparsity
from .block_sparse import awkward_masks, spread
from .block_sparse import parts as parts_of
from .bounds import LOSES_PARTS, Bound, Claims, accumulation_bound, epilogue_input, exact_limit
from .buffers import distinct
from .drawing import Drawing
from .one_hot import OneHotProbe
from .operands import Operands
from .propagate import Approximate, rounded
from .quantized import MOST_ADDED
from .reference import Reference, Region, as_batches, extended_reference, reference, regions


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Expected values of a region of the result. ``sums(batches, rows)`` are float64, before the epilogue and the last rounding."""

    region: Region
    sums: Callable[[slice, slice], Approximate]
    equal: Callable[[slice, slice], torch.Tensor] | None = None
    """Result in the accumulator's dtype, if out has that dtype and there is no epilogue."""


@dataclass(frozen=True, kw_only=True)
class Expectation(ABC):
    """Operands of a call and the result that they must give."""

    name: str
    operands: Operands

    @abstractmethod
    def parts(self, problem: Problem, claims: Claims) -> Iterator[Part]:
        """Yield the expected values of regions of the result under the claimed arithmetic. Waits for the device if sums flush."""

    def of_first_rows(self, m: int) -> "Expectation":  # noqa: ARG002 - only sampling subclasses use it
        """Return the expectation of the first ``m`` rows of the result."""
        return self

    def origin(self, index: tuple[int, ...], *, batched: bool) -> str:  # noqa: ARG002 - only picking subclasses use it
        """Describe the element of an operand that ``out[index]`` equals, for messages, or return ""."""
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
    """Expectation that each element is one picked by a probe."""

    probe: OneHotProbe
    scaled: bool = False
    """Flag for scales of any value: each product is then rounded a few times."""

    @classmethod
    def of(cls, probe: OneHotProbe, *, scaled: bool = False) -> "OneHotExpectation":
        return cls(name=probe.name, operands=probe.operands, probe=probe, scaled=scaled)

    def parts(self, problem: Problem, claims: Claims) -> Iterator[Part]:
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

        # The sums are stored unchanged if out holds every element of a and b. Quantized operations may have a narrower
        # out.
        fits = not problem.widens_b or dtype_info(problem.out.dtype).exact_integer >= dtype_info(problem.dtype).exact_integer
        equal = functools.partial(probe.exact, dtype=problem.accumulator) if fits and problem.epilogue is None else None
        yield Part(region=Region(), sums=exact, equal=equal)

    def origin(self, index: tuple[int, ...], *, batched: bool) -> str:
        """Describe the element that the probe picks for ``out[index]``."""
        return self.probe.origin(index, batched=batched)


@dataclass(frozen=True, kw_only=True)
class Referenced(Expectation):
    """Expectation from float64 products, of all of the result or of samples."""

    references: tuple[Reference, ...]
    integers: bool = False

    def parts(self, problem: Problem, claims: Claims) -> Iterator[Part]:
        for known, largest_sum in zip(self.references, self._largest_sums, strict=True):
            bound = self._bound_of_region(problem, claims, known)
            if self.integers and largest_sum <= exact_limit(problem, claims):
                bound = replace(bound, relative=0.0, absolute=0.0)

            def sums(batches: slice, rows: slice, known: Reference = known, bound: Bound = bound) -> Approximate:
                return Approximate(value=known.value[batches, rows], error=bound(known.magnitude[batches, rows]))

            yield Part(region=known.region, sums=sums)

    def of_first_rows(self, m: int) -> "Referenced":
        """Return the expectation for the sampled rows among the first ``m``."""
        return replace(self, references=tuple(x.of_first_rows(m) for x in self.references))

    def _bound_of_region(self, problem: Problem, claims: Claims, known: Reference) -> Bound:
        """Return the bound of sums over K, or for a block-sparse b a bound for each column from its number of blocks."""
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
        """Largest S of each reference for integers, whose sums may be exact, else 0."""
        return tuple(float(x.magnitude.max()) if self.integers and x.magnitude.numel() else 0.0 for x in self.references)


def referenced(problem: Problem, operands: Operands, *, name: str, integers: bool = False) -> Referenced:
    """Return float64 references, sampled for a large problem, and one of higher precision for a float64 problem."""
    shape = (problem.batch, problem.m, problem.n, problem.terms)
    references = [reference(operands, region) for region in regions(*shape, operands.a.device)]
    if problem.dtype == torch.float64 and not integers:
        references.append(extended_reference(operands, *shape))
    return Referenced(name=name, operands=operands, references=tuple(references), integers=integers)


@dataclass(frozen=True, kw_only=True)
class AbsentExpectation(Expectation):
    """Expectation for an a of ones with an infinity in its last column and a b of ones in its existing blocks.

    Every sum is a count. ``counts`` [N] counts the ones of b without its last row. ``present`` [N] marks the columns
    with a block there.
    """

    counts: torch.Tensor
    present: torch.Tensor

    @classmethod
    def drawn(cls, draw: Drawing, sparsity: Sparsity) -> "AbsentExpectation":
        """Draw the expectation of a problem whose a can hold an infinity in its last column."""
        n, k = draw.problem.n, draw.problem.k
        mask = next(mask for _, mask in awkward_masks((n, k), sparsity, draw.device))
        b = spread(mask, sparsity).t().to(draw.problem.dtype)
        ones = torch.ones(draw.size_a, dtype=draw.work_a, device=draw.device)
        finite = draw.operands(draw.placed_a(ones), draw.placed_b(b[None]), added=draw.small_inp(MOST_ADDED))
        distinct(finite.a)[..., -1] = math.inf
        return cls(name="absent blocks", operands=finite, counts=b[:-1].double().sum(dim=0), present=b[-1] != 0)

    def parts(self, problem: Problem, claims: Claims) -> Iterator[Part]:
        """Yield the whole result. Where b has no block it is the count if the claims skip absent blocks, else any value passes."""
        operands, bound = self.operands, self._bound(problem, claims)
        value = torch.where(self.present, math.inf, self.counts) * operands.alpha
        unknown = torch.full_like(self.counts, 0.0 if claims.skips_absent else math.inf).masked_fill(self.present, 0.0)
        magnitude = self.counts * abs(operands.alpha)
        size = (problem.batch, problem.m, problem.n)

        def sums(batches: slice, rows: slice) -> Approximate:
            shown, most = value.expand(size)[batches, rows], magnitude.expand(size)[batches, rows]
            if operands.inp is not None and operands.beta != 0:
                added = as_batches(operands.inp.expand(problem.out.size))[batches, rows].double() * operands.beta
                shown, most = shown + added, most + added.abs()
            return Approximate(value=shown, error=bound(most) + unknown)

        yield Part(region=Region(), sums=sums)
