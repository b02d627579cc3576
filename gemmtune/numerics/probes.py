"""Inputs on which every right kernel, in any order of summation, gives exactly one answer, known without a matrix product.

All of them are built from one idea: the product **picks** elements. Row i of a picks row k_i of b, times v_i; or column j of b
picks column l_j of a, times w_j.

==============  ==================================================================================================================
``cancel``      P4, P5. a = [X, −X + D], b = [Y; Y], K in two halves: dense integers whose sums grow large and cancel, except
                that D has one ±1 in each row. Finds narrow accumulators and split-K partials, dropped blocks, masks, strides,
                alpha, beta, an inp on the wrong axis.
``rows_of_b``   P2. a is one-hot in each row, b has full significands: a wrong index, an input that is silently narrowed. Some rows
                hold a NaN or an infinity instead of the 1.
``cols_of_a``   P3, the mirror image.
``both``        P2 and P3: the two in one: even rows pick from the first half of K, columns pick from the second for the odd rows.
``integers``    P1: small integers with a reference product, where the layouts of a or b do not let their elements be chosen.
==============  ==================================================================================================================
"""

from __future__ import annotations

import math

import torch

from ..problem import Layout, Problem
from . import operands
from .operands import Operands, allocate, distinct, fill_nan, flat, overlapping, scalar_value
from .pick import Pick
from .reference import as_batches

__all__ = ["Probes"]

ALPHA, BETA = 2.0, -3.0
"""Of class ``general`` in exact probes: a power of two, which scales exactly, and a small integer."""
MOST_INTEGER = 31
"""In a and b of the cancelling probe: exact in every dtype; so is its result with alpha and beta, even in bfloat16 (2·31 + 3·9)."""
MOST_ADDED = 9
INTEGER_SUM_BITS = 50
LEAST_NORMAL = 2.0**-12
"""Random numbers keep this distance from 0, so that they and half of them are normal numbers even in float16."""


class Probes:
    """Makes the probes of one problem on one device. Every operand lies in a buffer of exactly its layout, between NaNs."""

    def __init__(self, problem: Problem, device: torch.device, *, seed: int = 7) -> None:
        self.problem = problem
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.free_a = _free(problem.a, problem.k, problem.a.stride[-1])
        self.free_b = _free(problem.b, problem.k, problem.b.stride[-2])

    @property
    def can_pick_both(self) -> bool:
        """Whether ``both`` can be made."""
        problem = self.problem
        return self.free_a and self.free_b and problem.k >= 2 and _sizes(problem.a)[1] == problem.m >= 2

    def random(self) -> Operands:
        """Standard normal numbers (away from subnormal ones; on tf32's grid for a tf32 problem) as every other operand."""
        return self._operands(self._normal(self.problem.a), self._normal(self.problem.b), general=True)

    def extra(self) -> tuple[torch.Tensor, ...]:
        """Random operands for the epilogue."""
        return tuple(self._normal(layout) for layout in (self.problem.epilogue.operands if self.problem.epilogue else ()))

    def cancel(self, limit: int) -> Pick:
        """The cancelling probe with no sum of integers larger than ``limit`` on the way. Needs ``free_a`` and ``free_b``."""
        problem = self.problem
        half = problem.k // 2
        most, density = _range_for(limit, half, problem.dtype)
        a_size, b_size = _sizes(problem.a), _sizes(problem.b)
        x = self._integers((*a_size[:2], half), 1, most) * self._signs((*a_size[:2], 1))
        if density < 1:
            x = x * (torch.rand(x.shape, generator=self.generator, device=self.device) < density).to(x.dtype)
        a = torch.cat([x, -x, torch.zeros((*a_size[:2], problem.k - 2 * half), dtype=x.dtype, device=self.device)], dim=-1)
        index = self._indices(a_size[:2], half, problem.k)
        factor = self._signs(index.shape)
        a.scatter_add_(-1, index.unsqueeze(-1), factor.unsqueeze(-1))
        y = self._integers((b_size[0], half, b_size[2]), 1, most)
        last = self._integers((b_size[0], problem.k - 2 * half, b_size[2]), 1, most)
        b = torch.cat([y, y, last], dim=1) * self._signs((b_size[0], 1, b_size[2]))
        made = self._operands(self._placed(problem.a, a), self._placed(problem.b, b), added=self._small_inp(MOST_ADDED))
        return Pick(
            name="P5 cancellation",
            operands=made,
            by_rows=self._row_mask(True),
            special=False,
            row_factor=factor,
            row_index=index,
        )

    def rows_of_b(self, b: torch.Tensor, *, nan: bool = False) -> Pick:
        """One-hot rows of a over the given b, with NaN for every 1 if ``nan``. Needs ``free_a``."""
        index = self._indices(_sizes(self.problem.a)[:2], 0, self.problem.k)
        factor = self._factors(index.shape)
        if nan:
            factor.fill_(math.nan)
        a = self._placed(self.problem.a, self._one_hot(_sizes(self.problem.a), index, factor))
        made = self._operands(a, b, added=self._no_inp())
        return Pick(
            name="NaN in a" if nan else "P2 one-hot a",
            operands=made,
            by_rows=self._row_mask(True),
            row_factor=factor,
            row_index=index,
        )

    def cols_of_a(self, a: torch.Tensor) -> Pick:
        """One-hot columns of b over the given a. Needs ``free_b``."""
        batch, k, n = _sizes(self.problem.b)
        index = self._indices((batch, n), 0, k)
        factor = self._factors(index.shape)
        b = self._placed(self.problem.b, self._one_hot((batch, n, k), index, factor).mT)
        made = self._operands(a, b, added=self._no_inp())
        return Pick(name="P3 one-hot b", operands=made, by_rows=self._row_mask(False), col_factor=factor, col_index=index)

    def both(self, random: Operands) -> Pick:
        """The two in one, for K of at least 2, with the numbers of ``random``. Needs ``free_a`` and ``free_b``."""
        problem = self.problem
        half = problem.k // 2
        (batch_a, m, _), (batch_b, _, n) = _sizes(problem.a), _sizes(problem.b)
        row_index, col_index = self._indices((batch_a, m), 0, half), self._indices((batch_b, n), half, problem.k)
        row_factor = self._factors(row_index.shape)
        col_factor = torch.ones(col_index.shape, dtype=problem.dtype, device=self.device)
        by_rows = self._row_mask(True)
        by_rows[1::2] = False
        row_factor[~by_rows[:m].expand(row_factor.shape)] = 1
        a = as_batches(distinct(random.a)).clone()
        a[:, :, :half] = 0
        picking = self._one_hot((batch_a, m, problem.k), row_index, row_factor)
        a = torch.where(by_rows[:m].unsqueeze(-1), picking, a)
        b = as_batches(distinct(random.b)).clone()
        b[:, half:] = self._one_hot((batch_b, n, problem.k), col_index, col_factor).mT[:, half:]
        made = self._operands(self._placed(problem.a, a), self._placed(problem.b, b), added=self._no_inp())
        return Pick(
            name="P2+P3 one-hot", operands=made, by_rows=by_rows,
            row_factor=row_factor, row_index=row_index, col_factor=col_factor, col_index=col_index,
        )  # fmt: skip

    def integers(self) -> Operands:
        """Operands of −1, 0 and 1, placed by memory where elements overlap."""
        a, b = (self._placed(layout, self._integers(_held_size(layout), -1, 1)) for layout in (self.problem.a, self.problem.b))
        return self._operands(a, b, added=self._small_inp(MOST_ADDED))

    def _operands(self, a: torch.Tensor, b: torch.Tensor, *, added: torch.Tensor | None = None, general: bool = False) -> Operands:
        """inp is NaN throughout where beta is zero, since it must not be read; alpha and beta are those of random or exact data."""
        problem = self.problem
        inp = added
        if problem.inp is not None and problem.beta == "zero":
            inp = self._placed(problem.inp, None)
        elif problem.inp is not None and inp is None:
            inp = self._normal(problem.inp)
        alpha, beta = (operands.ALPHA, operands.BETA) if general else (ALPHA, BETA)
        return Operands(
            a=a,
            b=b,
            inp=inp,
            extra=(),
            out=torch.empty(0, dtype=problem.out.dtype, device=self.device),
            alpha=scalar_value(problem.alpha, alpha),
            beta=scalar_value(problem.beta, beta),
        )

    def _no_inp(self) -> torch.Tensor | None:
        return self._small_inp(0)

    def _small_inp(self, most: int) -> torch.Tensor | None:
        """inp of integers up to ``most``."""
        inp = self.problem.inp
        return None if inp is None else self._placed(inp, self._integers(_held_size(inp), -most, most))

    def _placed(self, layout: Layout, values: torch.Tensor | None) -> torch.Tensor:
        """A buffer of that layout, NaN throughout except for ``values``, as many as ``_held_size`` says; None leaves all NaN."""
        tensor = allocate(layout, self.device)
        fill_nan(tensor)
        if values is not None:
            target = flat(tensor) if overlapping(layout) else distinct(tensor)
            target.copy_(values.reshape(target.shape))
        return tensor

    def _normal(self, layout: Layout) -> torch.Tensor:
        dtype = torch.float64 if layout.dtype == torch.float64 else torch.float32
        values = torch.empty(_held_size(layout), dtype=dtype, device=self.device).normal_(generator=self.generator)
        values += torch.copysign(torch.where(values.abs() < LEAST_NORMAL, LEAST_NORMAL, 0.0), values)
        if self.problem.precision.input_mode == "tf32" and layout.dtype == torch.float32:
            values = (values.view(torch.int32) & -(2**13)).view(torch.float32)
        return self._placed(layout, values)

    def _integers(self, size: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, size, generator=self.generator, dtype=self.problem.dtype, device=self.device)

    def _signs(self, size: tuple[int, ...]) -> torch.Tensor:
        return self._integers(size, 0, 1) * 2 - 1

    def _indices(self, size: tuple[int, int], low: int, high: int) -> torch.Tensor:
        """Random indices, with ``low`` for the first and ``high − 1`` for the last of each batch."""
        index = torch.randint(low, high, size, generator=self.generator, device=self.device)
        index[:, 0] = low
        index[:, -1] = high - 1
        return index

    def _factors(self, size: tuple[int, ...]) -> torch.Tensor:
        """Ones, with a NaN where there are at least two, and infinities where there are at least four and no epilogue."""
        factor = torch.ones(size, dtype=self.problem.dtype, device=self.device)
        if self.problem.alpha == "zero":  # 0 · NaN need not be computed
            return factor
        if size[-1] >= 2:
            factor[:, 0] = math.nan
        if size[-1] >= 4 and self.problem.epilogue is None:
            factor[:, 2] = -math.inf
        return factor

    def _one_hot(self, size: tuple[int, ...], index: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(size, dtype=self.problem.dtype, device=self.device)
        return zeros.scatter_(-1, index.unsqueeze(-1), factor.unsqueeze(-1))

    def _row_mask(self, value: bool) -> torch.Tensor:
        return torch.full((self.problem.m,), value, device=self.device)


def _distinct_size(layout: Layout) -> tuple[int, ...]:
    """The layout's size with 1 for every dimension of stride 0."""
    return tuple(1 if s == 0 and n > 1 else n for n, s in zip(layout.size, layout.stride, strict=True))


def _held_size(layout: Layout) -> tuple[int, ...]:
    """What values the layout can hold: ``_distinct_size``, or its memory as one dimension where elements overlap."""
    return (layout.span,) if overlapping(layout) else _distinct_size(layout)


def _sizes(layout: Layout) -> tuple[int, int, int]:
    """``_distinct_size`` with a batch dimension."""
    size = _distinct_size(layout)
    return (1, *size) if len(size) == 2 else size  # type: ignore[return-value]


def _free(layout: Layout, k: int, k_stride: int) -> bool:
    """Whether each element along K can be chosen by itself."""
    return k > 0 and not overlapping(layout) and (k_stride != 0 or k == 1)


def _range_for(limit: int, half: int, dtype: torch.dtype) -> tuple[int, float]:
    """(largest integer, share of nonzero products) for sums of ``half`` products below ``limit``.

    float64 gets large integers: small ones would be summed exactly in float32 as well.
    """
    most = 2**20 if dtype == torch.float64 else MOST_INTEGER
    fitting = int(math.sqrt(min(limit, 2**INTEGER_SUM_BITS) / max(half, 1)))
    if fitting >= 1:
        return min(most, fitting), 1.0
    return 1, limit / (4 * half)
