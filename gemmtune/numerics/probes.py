"""Inputs with exactly one correct result in any order of summation, known without a matrix product.

All of them use one idea: the product **picks** elements. Row i of a picks row k_i of b, times v_i. Or column j of b picks
column l_j of a, times w_j.

==============  ==================================================================================================================
``cancel``      P4, P5. a = [X, −X + D], b = [Y; Y], K in two halves: dense integers whose sums grow large and cancel, except
                that D has one ±1 in each row. Finds narrow accumulators and split-K partials, dropped blocks, masks, strides,
                alpha, beta, an inp on the wrong axis.
``width``       P4. A large product, many small ones, the large one's opposite. Finds an accumulator or a partial sum with a few
                bits less than claimed.
``rows_of_b``   P2. a is one-hot in each row, b has full significands. Finds a wrong index, and an input silently narrowed.
                Some rows hold a NaN or an infinity instead of the 1. Some columns of b hold an infinity that meets zeros of a.
                Integer operands hold any integers. ``scaled``, P6: scales of any value, within a bound for one product. Finds
                scales or weights that are narrowed.
``cols_of_a``   P3, the mirror image.
``both``        P2 and P3 in one: even rows pick from the first half of K, and columns pick from the second half for the odd rows.
``integers``    P1: small integers with a reference product, for layouts of a or b whose elements cannot be chosen freely.
==============  ==================================================================================================================

In all other probes scales are powers of two, different from block to block. Zero points are integers, and are 0 where a has
full significands, because kernels may apply them to sums. ``random`` and ``filled`` are for the error bound.
"""

import math
from collections.abc import Sequence

import torch

from ..problem import Layout, Problem
from ..problem.dtypes import FLOAT8, dtype_info
from .block_sparse import awkward_masks
from .buffers import distinct, distinct_size, held_size, overlapping
from .drawing import Drawing
from .expectation import AbsentExpectation
from .joined import joined
from .one_hot import OneHotProbe
from .operands import Operands
from .quantized import MOST_ADDED, MOST_ZERO, cancelling_range, number_range, numbers
from .reference import as_batches
from .width import LEAST_K, width_rows

LEAST_LINES = 4
"""Fewest rows of a or columns of b for a special number in one of them. With fewer, only ``few_lines`` has special numbers."""


class Probes:
    """Maker of the probes of one problem on one device.

    Every operand lies in a buffer of exactly its layout, surrounded by NaN. If there are two products, a and b are
    ``Operands.left`` and ``right``, and the probes treat them as one product.
    """

    def __init__(self, problem: Problem, device: torch.device, *, seed: int = 7) -> None:
        self.problem = joined(problem)
        self._sparsity = problem.sparsity
        self.device = device
        self.free_a = _free([x for x in (problem.a, problem.c) if x is not None], -1)
        self.free_b = _free([x for x in (problem.b, problem.d) if x is not None], -2)
        self._draw = Drawing(problem, device, seed=seed)

    @property
    def can_pick_both(self) -> bool:
        """True if ``both`` can be made."""
        problem = self.problem
        return self.free_a and self.free_b and problem.k >= 2 and self._draw.size_a[1] == problem.m >= 2

    @property
    def can_measure_width(self) -> bool:
        """True if ``width`` can be made."""
        return self.free_a and self.free_b and self.problem.k >= LEAST_K

    def random(self) -> Operands:
        """Draw operands of standard normal numbers, away from subnormal ones and on tf32's grid for a tf32 problem. An
        integer dtype gets integers of the whole range. Weights with zero points are integers, also in 8-bit floats."""
        draw = self._draw
        return draw.operands(draw.normal(self.problem.a), draw.random_b(), general=True)

    def every_weight(self, b: torch.Tensor) -> torch.Tensor:
        """Return a b for ``rows_of_b``: 8-bit floats of all magnitudes if the problem has such weights, else the given ``b``."""
        if self.problem.widens_b and self.problem.b.dtype in FLOAT8 and self.problem.zero_b is None:
            return self._draw.every_weight()
        return b

    def filled(self, fill_a: str, fill_b: str, *, general: bool = True) -> Operands:
        """Draw a and b of the kinds named in fills.py. Raises GemmtuneError for an unknown name, or one that the dtype lacks.

        The numbers are not on tf32's grid, so reading them as tf32 costs an error. With ``general`` alpha, beta and scales have any
        value and inp is normal. Otherwise they are those of exact probes.
        """
        draw, a, b = self._draw, self.problem.a, self.problem.b
        made = (draw.values(fill_a, a, -1), draw.values(fill_b, b, -2))
        added = None if general else draw.small_inp(MOST_ADDED)
        return draw.operands(draw.placed(a, made[0]), draw.placed(b, made[1]), added=added, general=general)

    def patterns(self) -> dict[str, Operands]:
        """Return random operands for each pattern of blocks on which block-sparse kernels go wrong, by name."""
        draw, b, sparsity = self._draw, self.problem.b, self._sparsity
        if sparsity is None:
            return {}
        masks = awkward_masks((b.size[1], b.size[0]), sparsity, self.device)
        return {
            name: draw.operands(draw.normal(self.problem.a), draw.masked(draw.normal(b, -2), mask), general=True)
            for name, mask in masks
        }

    def absent(self) -> AbsentExpectation | None:
        """Return an expectation with an infinity of a at absent blocks, or None without such blocks or infinities."""
        if self._sparsity is None or self.problem.integers or self.problem.alpha == "zero" or not self.free_a:
            return None
        return AbsentExpectation.drawn(self._draw, self._sparsity)

    def extra(self) -> tuple[torch.Tensor, ...]:
        """Draw random operands for the epilogue."""
        epilogue = self.problem.epilogue
        return tuple(self._draw.read_by_epilogue(layout) for layout in (epilogue.operands if epilogue else ()))

    def cancel(self, limit: int) -> OneHotProbe:
        """Return the cancelling probe, whose partial sums of integers stay within ``limit``. Needs ``free_a`` and ``free_b``."""
        draw, problem = self._draw, self.problem
        half = problem.k // 2
        most_a, most_b, density = cancelling_range(limit, half, problem)
        a_size, b_size = draw.size_a, draw.size_b
        x = draw.integers((*a_size[:2], half), 1, most_a) * draw.signs((*a_size[:2], 1))
        if density < 1:
            x = x * (torch.rand(x.shape, generator=draw.generator, device=self.device) < density).to(x.dtype)
        y = draw.integers((b_size[0], half, b_size[2]), 1, most_b, draw.work_b)
        index = draw.indices(a_size[:2], half, problem.k)
        factor = draw.signs(index.shape)
        if half and problem.k % 2:  # the last term takes one from a product in the middle, so that it counts in every row
            middle = slice(half // 2, half // 2 + 1)
            term, last = x[..., middle].sign(), y[:, middle]
            factor = torch.where((index == problem.k - 1) & (term[..., 0] != 0), term[..., 0], factor)
            a = torch.cat([x, -x, term], dim=-1)
            a[..., middle] -= term
        else:
            last = draw.integers((b_size[0], problem.k - 2 * half, b_size[2]), 1, most_b, draw.work_b)
            a = torch.cat([x, -x, torch.zeros((*a_size[:2], problem.k - 2 * half), dtype=x.dtype, device=self.device)], dim=-1)
        a.scatter_add_(-1, index.unsqueeze(-1), factor.unsqueeze(-1))
        b = torch.cat([y, y, last], dim=1) * draw.signs_b((b_size[0], 1, b_size[2]))
        scaling = draw.scaling(separable=True, most_zero=MOST_ZERO if b_size[2] == problem.n else 0)
        made, factor = draw.scaled_operands(a, b, scaling), draw.undone(scaling, factor, index)
        return OneHotProbe(name="P5 cancellation", operands=made, row_factor=factor, row_index=index)

    def width(self, limit: int) -> OneHotProbe:
        """Return the width probe, whose sums stay within ``limit`` of its small products. Needs ``can_measure_width``."""
        draw, problem = self._draw, self.problem
        (batch_a, m, k), (batch_b, _, n) = draw.size_a, draw.size_b
        made = width_rows(m, k, limit, problem)
        rows, col, factor = (x.to(self.device) for x in (made.rows, made.col, made.factor))
        which = torch.arange(m, device=self.device) % len(rows)
        signs, index = draw.signs((batch_a, m)), made.index.to(self.device)[which].expand(batch_a, m)
        a = rows.to(draw.work_a)[which] * signs.unsqueeze(-1)
        b = col.to(draw.work_b).unsqueeze(-1) * draw.signs_b((batch_b, 1, n))
        scaling = draw.scaling(separable=True)
        factor = draw.undone(scaling, factor.to(draw.work_a)[which] * signs, index)
        return OneHotProbe(name="P4 width", operands=draw.scaled_operands(a, b, scaling), row_factor=factor, row_index=index)

    def rows_of_b(
        self, b: torch.Tensor, *, special: bool = True, few_lines: bool = False, scaled: bool = False, in_turn: bool = False
    ) -> OneHotProbe:
        """Return a probe with one-hot rows of a over the given b. Needs ``free_a``.

        ``special`` replaces some of the ones, and some numbers of b, by a NaN and an infinity if the dtypes have them.
        ``few_lines`` puts them in a column of b only, even if there are few columns. So does ``in_turn``, by which a is an identity
        if it is square. ``scaled`` leaves them out and uses scales and zero points of any value. Such a result is not exact: a
        single product has one rounding for each operation (``accumulation_bound`` with ``terms=1``).
        """
        draw, special, few_lines = self._draw, special and not scaled, few_lines or in_turn
        index = draw.indices(draw.size_a[:2], 0, self.problem.k, in_turn=in_turn)
        factor = self._factors(index.shape, self.problem.a.dtype, special=special and not few_lines)
        a = draw.placed_a(self._one_hot(draw.size_a, index, factor))
        planted = self._places(-1, few_lines=few_lines) if special and self.free_b else []
        scaling = None if scaled else draw.gathered_scaling()
        made = draw.operands(a, self._planted(b, planted, -1), added=draw.small_inp(0), scaling=scaling, general=scaled)
        name = "P6 scales" if scaled else "P2 one-hot a"
        return OneHotProbe(name=name, operands=made, row_factor=factor, row_index=index, planted_cols=tuple(planted))

    def cols_of_a(self, a: torch.Tensor, *, special: bool = True, few_lines: bool = False, in_turn: bool = False) -> OneHotProbe:
        """Return a probe with one-hot columns of b over the given a, like ``rows_of_b``. Needs ``free_b``."""
        draw, few_lines = self._draw, few_lines or in_turn
        batch, k, n = draw.size_b
        index = draw.indices((batch, n), 0, k, in_turn=in_turn)
        if self.problem.widens_b and dtype_info(self.problem.b.dtype).is_integer:
            factor = draw.powers(index.shape)  # exact products
        else:
            factor = self._factors(index.shape, self.problem.b.dtype, special=special and not few_lines).to(draw.work_b)
        b = draw.placed_b(self._one_hot((batch, n, k), index, factor).mT)
        planted = self._places(-2, few_lines=few_lines) if special and self.free_a else []
        made = draw.operands(self._planted(a, planted, -2), b, added=draw.small_inp(0))
        return OneHotProbe(name="P3 one-hot b", operands=made, col_factor=factor, col_index=index, planted_rows=tuple(planted))

    def special_in_few_lines(self, random: Operands) -> list[OneHotProbe]:
        """Return one-hot probes with special numbers for few rows of a and few columns of b. Other probes have none there."""
        made = []
        if self.free_a and self.free_b and self.problem.m < LEAST_LINES:
            made.append(self.cols_of_a(random.left, few_lines=True))
        if self.free_a and self.free_b and self.problem.n < LEAST_LINES:
            made.append(self.rows_of_b(random.right, few_lines=True))
        return [probe for probe in made if probe.planted_rows or probe.planted_cols]

    def both(self, random: Operands) -> OneHotProbe:
        """Return the probe that picks rows and columns from ``random``. Needs K of at least 2, ``free_a`` and ``free_b``."""
        draw, problem = self._draw, self.problem
        half = problem.k // 2
        (batch_a, m, _), (batch_b, _, n) = draw.size_a, draw.size_b
        row_index, col_index = draw.indices((batch_a, m), 0, half), draw.indices((batch_b, n), half, problem.k)
        row_factor = self._factors(row_index.shape, problem.a.dtype)
        col_factor = torch.ones(col_index.shape, dtype=draw.work_b, device=self.device)
        by_rows = torch.arange(problem.m, device=self.device) % 2 == 0
        row_factor[~by_rows[:m].expand(row_factor.shape)] = 1
        a = as_batches(distinct(random.left)).to(draw.work_a, copy=True)
        a[:, :, :half] = 0
        picking = self._one_hot((batch_a, m, problem.k), row_index, row_factor)
        a = torch.where(by_rows[:m].unsqueeze(-1), picking, a)
        b = as_batches(numbers(distinct(random.right), problem.encoding)).to(draw.work_b, copy=True)
        b[:, half:] = self._one_hot((batch_b, n, problem.k), col_index, col_factor).mT[:, half:]
        planted = [(m // 2 * 2 - 1, problem.k - 1)] if self._places(-2) else []
        made = draw.operands(self._planted(draw.placed_a(a), planted, -2), draw.placed_b(b), added=draw.small_inp(0))
        return OneHotProbe(
            name="P2+P3 one-hot", operands=made, by_rows=by_rows, planted_rows=tuple(planted),
            row_factor=row_factor, row_index=row_index, col_factor=col_factor, col_index=col_index,
        )  # fmt: skip

    def integers(self) -> Operands:
        """Return operands of −1, 0 and 1, or unsigned weights of 0 and 1. Where elements overlap, values follow memory order."""
        draw, problem = self._draw, self.problem
        a = draw.integers(held_size(problem.a), -1, 1)
        low, size = max(number_range(problem)[0], -1), held_size(problem.b)
        if problem.encoding:
            first, second = (draw.integers(size, low, 1, torch.int32) & 15 for _ in range(2))
            b = first | second << 4
        else:
            b = draw.integers(size, low, 1, draw.work_b)
        made = draw.placed(problem.a, a), draw.placed(problem.b, b)
        return draw.operands(*made, added=draw.small_inp(MOST_ADDED), scaling=draw.scaling(most_zero=1))

    def _factors(self, size: tuple[int, ...], dtype: torch.dtype, *, special: bool = True) -> torch.Tensor:
        """Return ones, with a NaN for ``special`` if there are at least two, and infinities if there are at least four.
        Integers have neither, and get any nonzero value in every place."""
        info = dtype_info(dtype)
        if info.is_integer:
            return self._draw.integers(size, 1, int(info.largest)) * self._draw.signs(size)
        factor = torch.ones(size, dtype=self._draw.work_a, device=self.device)
        if not special or self.problem.alpha == "zero":  # 0 · NaN need not be computed
            return factor
        if size[-1] >= 2:
            factor[:, 0] = math.nan
        if size[-1] >= 4 and self._has_infinity(dtype):
            factor[:, 2] = -math.inf
        return factor

    def _places(self, dim: int, *, few_lines: bool = False) -> list[tuple[int, int]]:
        """Return (line, place along K) of the numbers of a (``dim`` −2) or b (−1) that are not finite. The last and the first
        place are where kernels mishandle the end or the start of K. Such a line shows nothing else."""
        layout, k = self._side(dim), self.problem.k
        lines = layout.size[dim]
        if distinct_size(layout)[dim] != lines or dtype_info(layout.dtype).is_integer or self.problem.alpha == "zero":
            return []
        if lines < LEAST_LINES:
            return [(lines - 1, k - 1 if dim == -2 else 0)] if few_lines else []
        return [(lines // 2, k - 1), (lines - 1, 0)] if lines >= 2 * LEAST_LINES else [(lines // 2, k - 1)]

    def _planted(self, given: torch.Tensor, places: Sequence[tuple[int, int]], dim: int) -> torch.Tensor:
        """Return ``given`` with an infinity, or a NaN, in these places, or unchanged if there are none."""
        if not places:
            return given
        planted = self._draw.placed(self._side(dim), distinct(given))
        held = distinct(planted if dim == -2 else planted.mT)
        number = torch.tensor(math.inf if self._has_infinity(given.dtype) else math.nan, device="cpu")
        for line, place in places:
            held[..., line, place].copy_(number)
        return planted

    def _side(self, dim: int) -> Layout:
        return self.problem.a if dim == -2 else self.problem.b

    def _has_infinity(self, dtype: torch.dtype) -> bool:
        """Return True if probes have infinities. With zero points a kernel may subtract two infinities, so there are none."""
        return self.problem.epilogue is None and dtype_info(dtype).has_infinity and self.problem.zero_b is None

    def _one_hot(self, size: tuple[int, ...], index: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(size, dtype=factor.dtype, device=self.device)
        return zeros.scatter_(-1, index.unsqueeze(-1), factor.unsqueeze(-1))


def _free(layouts: Sequence[Layout], k_dim: int) -> bool:
    """Return True if each element along K can be chosen independently, in one operand or in two that are concatenated."""
    k = sum(layout.size[k_dim] for layout in layouts)
    alone = len(layouts) == 1
    return k > 0 and all(
        not overlapping(layout)
        and (layout.stride[k_dim] != 0 or layout.size[k_dim] <= 1)
        and (alone or distinct_size(layout) == layout.size)
        for layout in layouts
    )
