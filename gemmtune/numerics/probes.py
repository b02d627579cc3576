"""Inputs on which every right kernel, in any order of summation, gives exactly one answer, known without a matrix product.

All of them are built from one idea: the product **picks** elements. Row i of a picks row k_i of b, times v_i; or column j of b
picks column l_j of a, times w_j.

==============  ==================================================================================================================
``cancel``      P4, P5. a = [X, −X + D], b = [Y; Y], K in two halves: dense integers whose sums grow large and cancel, except
                that D has one ±1 in each row. Finds narrow accumulators and split-K partials, dropped blocks, masks, strides,
                alpha, beta, an inp on the wrong axis.
``width``       P4. A large product, many small ones, the large one's opposite: finds an accumulator or a partial sum that has a
                few bits less than claimed.
``rows_of_b``   P2. a is one-hot in each row, b has full significands: a wrong index, an input that is silently narrowed. Some rows
                hold a NaN or an infinity instead of the 1; integers hold any integer.
``cols_of_a``   P3, the mirror image.
``both``        P2 and P3: the two in one: even rows pick from the first half of K, columns pick from the second for the odd rows.
``integers``    P1: small integers with a reference product, where the layouts of a or b do not let their elements be chosen.
==============  ==================================================================================================================

Scales are powers of two in all of these. ``random`` and ``filled`` are for the error bound.
"""

from __future__ import annotations

import math

import torch

from ..errors import GemmtuneError
from ..problem import Layout, Problem
from ..problem.dtypes import FLOAT8, dtype_info
from . import operands
from .fills import fill_named
from .integers import MOST_ADDED, cancelling_range, most_factor
from .operands import (
    Operands,
    allocate,
    distinct,
    distinct_size,
    fill_random,
    held_size,
    overlapping,
    placed,
    random_scale,
    scalar_value,
)
from .pick import Pick
from .reference import as_batches
from .width import LEAST_K, width_rows

__all__ = ["Probes"]

ALPHA, BETA = 2.0, -3.0
"""Of class ``general`` in exact probes: a power of two, which scales exactly, and a small integer."""


class Probes:
    """Makes the probes of one problem on one device. Every operand lies in a buffer of exactly its layout, between NaNs."""

    def __init__(self, problem: Problem, device: torch.device, *, seed: int = 7) -> None:
        self.problem = problem
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.free_a = _free(problem.a, problem.k, problem.a.stride[-1])
        self.free_b = _free(problem.b, problem.k, problem.b.stride[-2])
        self._work = torch.float32 if problem.dtype in FLOAT8 else problem.dtype
        """In which numbers are put together: torch does little with 8-bit floats."""

    @property
    def can_pick_both(self) -> bool:
        """Whether ``both`` can be made."""
        problem = self.problem
        return self.free_a and self.free_b and problem.k >= 2 and _sizes(problem.a)[1] == problem.m >= 2

    @property
    def can_measure_width(self) -> bool:
        """Whether ``width`` can be made."""
        return self.free_a and self.free_b and self.problem.k >= LEAST_K

    @property
    def has_nan(self) -> bool:
        """Whether a and b can hold a NaN."""
        return not dtype_info(self.problem.dtype).is_integer

    def random(self) -> Operands:
        """Standard normal numbers (away from subnormal ones; on tf32's grid for a tf32 problem) as every other operand.

        Integers of the whole range for an integer dtype.
        """
        return self._operands(self._normal(self.problem.a), self._normal(self.problem.b), general=True)

    def filled(self, fill_a: str, fill_b: str, *, general: bool = True) -> Operands:
        """a and b of the kinds named in fills.py. Unlike ``random``, not on tf32's grid: reading them as tf32 costs an error.

        ``general``: alpha, beta and scales are any numbers and inp is normal; else they are as in exact probes.

        Raises:
            GemmtuneError: a name that is none, or none for this dtype.
        """
        a, b = self.problem.a, self.problem.b
        made = (self._values(fill_a, a, -1), self._values(fill_b, b, -2))
        added = None if general else self._small_inp(MOST_ADDED)
        return self._operands(self._placed(a, made[0]), self._placed(b, made[1]), added=added, general=general)

    def extra(self) -> tuple[torch.Tensor, ...]:
        """Random operands for the epilogue."""
        return tuple(self._read_by_epilogue(layout) for layout in (self.problem.epilogue.operands if self.problem.epilogue else ()))

    def cancel(self, limit: int) -> Pick:
        """The cancelling probe with no sum of integers larger than ``limit`` on the way. Needs ``free_a`` and ``free_b``."""
        problem = self.problem
        half = problem.k // 2
        most, density = cancelling_range(limit, half, problem)
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

    def width(self, limit: int) -> Pick:
        """The width probe with no sum larger than ``limit`` of its small products. Needs ``can_measure_width``."""
        problem = self.problem
        (batch_a, m, k), (batch_b, _, n) = _sizes(problem.a), _sizes(problem.b)
        made = width_rows(m, k, limit, problem.a.dtype, problem.b.dtype)
        rows, col, factor = (x.to(self.device, self._work) for x in (made.rows, made.col, made.factor))
        which = torch.arange(m, device=self.device) % len(rows)
        signs = self._signs((batch_a, m))
        a = rows[which] * signs.unsqueeze(-1)
        b = col.unsqueeze(-1) * self._signs((batch_b, 1, n))
        return Pick(
            name="P4 width",
            operands=self._operands(self._placed(problem.a, a), self._placed(problem.b, b), added=self._small_inp(MOST_ADDED)),
            by_rows=self._row_mask(True),
            special=False,
            row_factor=factor[which] * signs,
            row_index=made.index.to(self.device)[which].expand(batch_a, m),
        )

    def rows_of_b(self, b: torch.Tensor, *, nan: bool = False, special: bool = True) -> Pick:
        """One-hot rows of a over the given b, with NaN for every 1 if ``nan``. Needs ``free_a``.

        ``special``: with a NaN and an infinity for some of the ones, where the dtype has them.

        Raises:
            GemmtuneError: ``nan`` for a dtype without one.
        """
        index = self._indices(_sizes(self.problem.a)[:2], 0, self.problem.k)
        factor = self._factors(index.shape, self.problem.a.dtype, special=special)
        if nan and not self.has_nan:
            raise GemmtuneError(f"rows_of_b: nan=True needs a dtype that has one, got {self.problem.dtype}; see Probes.has_nan")
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

    def cols_of_a(self, a: torch.Tensor, *, special: bool = True) -> Pick:
        """One-hot columns of b over the given a, ``special`` as for ``rows_of_b``. Needs ``free_b``."""
        batch, k, n = _sizes(self.problem.b)
        index = self._indices((batch, n), 0, k)
        factor = self._factors(index.shape, self.problem.b.dtype, special=special)
        b = self._placed(self.problem.b, self._one_hot((batch, n, k), index, factor).mT)
        made = self._operands(a, b, added=self._no_inp())
        return Pick(name="P3 one-hot b", operands=made, by_rows=self._row_mask(False), col_factor=factor, col_index=index)

    def both(self, random: Operands) -> Pick:
        """The two in one, for K of at least 2, with the numbers of ``random``. Needs ``free_a`` and ``free_b``."""
        problem = self.problem
        half = problem.k // 2
        (batch_a, m, _), (batch_b, _, n) = _sizes(problem.a), _sizes(problem.b)
        row_index, col_index = self._indices((batch_a, m), 0, half), self._indices((batch_b, n), half, problem.k)
        row_factor = self._factors(row_index.shape, problem.a.dtype)
        col_factor = torch.ones(col_index.shape, dtype=self._work, device=self.device)
        by_rows = self._row_mask(True)
        by_rows[1::2] = False
        row_factor[~by_rows[:m].expand(row_factor.shape)] = 1
        a = as_batches(distinct(random.a)).to(self._work, copy=True)
        a[:, :, :half] = 0
        picking = self._one_hot((batch_a, m, problem.k), row_index, row_factor)
        a = torch.where(by_rows[:m].unsqueeze(-1), picking, a)
        b = as_batches(distinct(random.b)).to(self._work, copy=True)
        b[:, half:] = self._one_hot((batch_b, n, problem.k), col_index, col_factor).mT[:, half:]
        made = self._operands(self._placed(problem.a, a), self._placed(problem.b, b), added=self._no_inp())
        return Pick(
            name="P2+P3 one-hot", operands=made, by_rows=by_rows,
            row_factor=row_factor, row_index=row_index, col_factor=col_factor, col_index=col_index,
        )  # fmt: skip

    def integers(self) -> Operands:
        """Operands of −1, 0 and 1, placed by memory where elements overlap."""
        a, b = (self._placed(layout, self._integers(held_size(layout), -1, 1)) for layout in (self.problem.a, self.problem.b))
        return self._operands(a, b, added=self._small_inp(MOST_ADDED))

    def _operands(self, a: torch.Tensor, b: torch.Tensor, *, added: torch.Tensor | None = None, general: bool = False) -> Operands:
        """inp is NaN throughout where beta is zero, since it must not be read; alpha and beta are those of random or exact data."""
        problem = self.problem
        inp = added
        if problem.inp is not None and problem.beta == "zero":
            inp = self._placed(problem.inp, None)
        elif problem.inp is not None and inp is None:
            inp = self._normal(problem.inp)
        scales = [
            random_scale(layout, self.generator, self.device, exact=not general) if layout is not None else None
            for layout in (problem.scale_a, problem.scale_b)
        ]
        alpha, beta = (operands.ALPHA, operands.BETA) if general else (ALPHA, BETA)
        return Operands(
            a=a,
            b=b,
            inp=inp,
            extra=(),
            out=torch.empty(0, dtype=problem.out.dtype, device=self.device),
            alpha=scalar_value(problem.alpha, alpha),
            beta=scalar_value(problem.beta, beta),
            scale_a=scales[0],
            scale_b=scales[1],
        )

    def _no_inp(self) -> torch.Tensor | None:
        return self._small_inp(0)

    def _small_inp(self, most: int) -> torch.Tensor | None:
        """inp of integers up to ``most``."""
        inp = self.problem.inp
        return None if inp is None else self._placed(inp, self._integers(held_size(inp), -most, most))

    def _placed(self, layout: Layout, values: torch.Tensor | None) -> torch.Tensor:
        return placed(layout, self.device, values)

    def _values(self, fill: str, layout: Layout, k_dim: int) -> torch.Tensor:
        """Numbers of a fill; integers smaller where products of the largest could add up to more than int32 holds."""
        values = fill_named(fill, layout.dtype)(layout, self.generator, self.device, k_dim)
        if self.has_nan:
            return values
        most = most_factor(self.problem.k, layout.dtype)
        return values.clamp(-most - 1, most)

    def _read_by_epilogue(self, layout: Layout) -> torch.Tensor:
        if layout.dtype != torch.bool:
            return self._normal(layout)
        mask = allocate(layout, self.device)
        fill_random(mask, self.generator)
        return mask

    def _normal(self, layout: Layout) -> torch.Tensor:
        values = self._values("normal", layout, -1)
        if self.problem.precision.input_mode == "tf32" and layout.dtype == torch.float32:
            values = (values.view(torch.int32) & -(2**13)).view(torch.float32)
        return self._placed(layout, values)

    def _integers(self, size: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, size, generator=self.generator, dtype=self._work, device=self.device)

    def _signs(self, size: tuple[int, ...]) -> torch.Tensor:
        return self._integers(size, 0, 1) * 2 - 1

    def _indices(self, size: tuple[int, int], low: int, high: int) -> torch.Tensor:
        """Random indices, with ``low`` for the first and ``high − 1`` for the last of each batch."""
        index = torch.randint(low, high, size, generator=self.generator, device=self.device)
        index[:, 0] = low
        index[:, -1] = high - 1
        return index

    def _factors(self, size: tuple[int, ...], dtype: torch.dtype, *, special: bool = True) -> torch.Tensor:
        """Ones; if ``special``, a NaN where there are at least two, and infinities where there are at least four and no epilogue.

        Integers have neither, and any value but 0 in every place.
        """
        info = dtype_info(dtype)
        if info.is_integer:
            return self._integers(size, 1, int(info.largest)) * self._signs(size)
        factor = torch.ones(size, dtype=self._work, device=self.device)
        if not special or self.problem.alpha == "zero":  # 0 · NaN need not be computed
            return factor
        if size[-1] >= 2:
            factor[:, 0] = math.nan
        if size[-1] >= 4 and self.problem.epilogue is None and info.has_infinity:
            factor[:, 2] = -math.inf
        return factor

    def _one_hot(self, size: tuple[int, ...], index: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(size, dtype=self._work, device=self.device)
        return zeros.scatter_(-1, index.unsqueeze(-1), factor.unsqueeze(-1))

    def _row_mask(self, value: bool) -> torch.Tensor:
        return torch.full((self.problem.m,), value, device=self.device)


def _sizes(layout: Layout) -> tuple[int, int, int]:
    """``distinct_size`` with a batch dimension."""
    size = distinct_size(layout)
    return (1, *size) if len(size) == 2 else size  # type: ignore[return-value]


def _free(layout: Layout, k: int, k_stride: int) -> bool:
    """Whether each element along K can be chosen by itself."""
    return k > 0 and not overlapping(layout) and (k_stride != 0 or k == 1)
