"""Random numbers for the operands of one problem, and complete operands with scales, zero points and added terms."""

import torch

from ..problem import Layout, Problem
from ..problem.dtypes import FLOAT8, dtype_info, is_float8
from .block_sparse import random_mask, spread
from .buffers import allocate, distinct_size, held_size, overlapping, placed
from .fills import filled
from .joined import joined, parted
from .operands import ALPHA as GENERAL_ALPHA
from .operands import BETA as GENERAL_BETA
from .operands import Operands, fill_random, scalar_value
from .quantized import MOST_ADDED, MOST_ZERO, most_factor, number_range, packed, scale_at
from .scaling import Scaling, exact_scaling, random_scaling

ALPHA, BETA = 2.0, -3.0
"""Scalars of class ``general`` in exact probes: a power of two, which scales exactly, and a small integer."""

_FINITE: dict[torch.dtype, tuple[int, int]] = {torch.float8_e4m3fn: (0, 0x7E), torch.float8_e5m2: (0x08, 0x6F)}
"""Range of the bits of weight magnitudes. Small multiples of e5m2 numbers stay within the normal numbers of float16."""


class Drawing:
    """Source of random operands for one problem on one device.

    Values of a and b are [B, rows, cols], with size 1 where their memory is shared. A sum of two products is drawn as one
    (``joined``), and its operands are split at the end. ``work_a`` and ``work_b`` are the dtypes in which values are
    assembled: torch supports few operations on 8-bit floats, and b's numbers may be packed.
    """

    def __init__(self, problem: Problem, device: torch.device, *, seed: int) -> None:
        self._stated = problem
        self.problem = problem = joined(problem)
        self._unscaled = problem.scale_a is not None and self._stated.scale_a is None  # scales are for the dense problem
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.size_a = _batched(distinct_size(problem.a))
        batch, rows, cols = _batched(distinct_size(problem.b))
        self.size_b = (batch, 2 * rows if problem.encoding else rows, cols)
        self.work_a = torch.float32 if is_float8(problem.dtype) else problem.dtype
        self.work_b = torch.float32 if problem.widens_b else self.work_a

    def integers(self, size: tuple[int, ...], low: int, high: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Draw integers from ``low`` to ``high``, of a's working dtype by default."""
        return torch.randint(low, high + 1, size, generator=self.generator, dtype=dtype or self.work_a, device=self.device)

    def signs(self, size: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Draw −1 and 1."""
        return self.integers(size, 0, 1, dtype) * 2 - 1

    def signs_b(self, size: tuple[int, ...]) -> torch.Tensor:
        """Draw signs for numbers of b, which are all 1 if those are unsigned."""
        if number_range(self.problem)[0] == 0:
            return torch.ones(size, dtype=self.work_b, device=self.device)
        return self.signs(size, self.work_b)

    def indices(self, size: tuple[int, int], low: int, high: int, *, in_turn: bool = False) -> torch.Tensor:
        """Draw indices with ``low`` as the first and ``high − 1`` as the last of each batch, or return each one ``in_turn``."""
        if in_turn:
            return torch.arange(size[1], device=self.device).remainder(high - low).add(low).expand(size).clone()
        index = torch.randint(low, high, size, generator=self.generator, device=self.device)
        index[:, 0] = low
        index[:, -1] = high - 1
        return index

    def powers(self, size: tuple[int, ...]) -> torch.Tensor:
        """Draw powers of two that b's integers can hold, signed if b is, including the number with the sign bit alone."""
        low, high = number_range(self.problem)
        exponents = self.integers(size, 0, max(-low, high + 1).bit_length() - (1 if low else 2), torch.int32)
        values = torch.exp2(exponents.to(self.work_b)) * self.signs_b(size)
        return torch.where(values > high, -values, values)

    def values(self, fill: str, layout: Layout, k_dim: int) -> torch.Tensor:
        """Draw numbers of a fill for a (``k_dim`` −1), b (−2) or another operand, to the capacity of its layout.

        Integers are limited where products of the largest could overflow int32, and unsigned types get no negative ones.
        Four-bit numbers are the upper halves of numbers that fill eight bits, or those clamped to the range.
        """
        if k_dim == -2 and self.problem.encoding:
            return packed(self._four_bits(fill))
        values = filled(fill, layout, self.generator, self.device, k_dim)
        if dtype_info(self.problem.accumulator).is_integer:
            most = most_factor(self.problem.k, layout.dtype)
            return values.clamp(-most - 1, most)
        return values.abs() if layout.dtype == torch.uint8 else values

    def _four_bits(self, fill: str) -> torch.Tensor:
        low, high = number_range(self.problem)
        size = (2, self.problem.b.span) if overlapping(self.problem.b) else self.size_b[1:]
        layout = Layout.contiguous(size, torch.int8 if low else torch.uint8)
        values = filled(fill, layout, self.generator, self.device, -2).to(torch.int32)
        if fill in ("normal", "uniform", "cancelling"):
            values = values >> 4
        return (values if low else values.abs()).clamp(low, high)

    def every_weight(self) -> torch.Tensor:
        """Return a b of 8-bit floats of all magnitudes, including subnormal ones."""
        layout = self.problem.b
        low, high = _FINITE[layout.dtype]
        bits = self.integers(held_size(layout), low, high, torch.int32) + 128 * self.integers(held_size(layout), 0, 1, torch.int32)
        return self.placed(layout, bits.to(torch.uint8).view(layout.dtype))

    def placed(self, layout: Layout, values: torch.Tensor | None) -> torch.Tensor:
        """Return a buffer of the layout with these values, or with NaN everywhere for None."""
        return placed(layout, self.device, values)

    def placed_a(self, values: torch.Tensor) -> torch.Tensor:
        """Return a with the numbers ``values`` (of ``size_a``)."""
        return self.placed(self.problem.a, values)

    def placed_b(self, values: torch.Tensor) -> torch.Tensor:
        """Return b with the numbers ``values`` (of ``size_b``), packed if b is."""
        return self.placed(self.problem.b, packed(values) if self.problem.encoding else values)

    def normal(self, layout: Layout, k_dim: int = -1) -> torch.Tensor:
        """Draw standard normal numbers away from subnormal ones, on tf32's grid for a tf32 problem; integers of the whole range."""
        values = self.values("normal", layout, k_dim)
        if dtype_info(self.problem.accumulator).is_integer and layout.dtype == self.problem.dtype:
            values = self._with_extremes(values, most_factor(self.problem.k, layout.dtype), k_dim)
        if self.problem.precision.input_mode == "tf32" and layout.dtype == torch.float32:
            values = (values.view(torch.int32) & -(2**13)).view(torch.float32)
        return self.placed(layout, values)

    def _with_extremes(self, values: torch.Tensor, most: int, k_dim: int) -> torch.Tensor:
        """Set a quarter of the integers, the first row of a and the outer columns of b to the largest or the least."""
        share = torch.rand(values.shape, generator=self.generator, device=self.device)
        values = torch.where(share < 1 / 8, -most - 1, torch.where(share > 7 / 8, most, values))
        if values.dim() == 2 and values.numel():
            lines = values if k_dim == -1 else values.mT
            if k_dim == -2:
                lines[0] = most
            lines[-1 if k_dim == -2 else 0] = -most - 1
        return values

    def small_inp(self, most: int) -> torch.Tensor | None:
        """Draw inp of integers up to ``most``, or return None if the problem has no inp."""
        inp = self.problem.inp
        return None if inp is None else self.placed(inp, self.integers(held_size(inp), -most, most))

    def read_by_epilogue(self, layout: Layout) -> torch.Tensor:
        """Draw an operand of the epilogue: normal numbers, or a mask."""
        if layout.dtype != torch.bool:
            return self.normal(layout)
        mask = allocate(layout, self.device)
        fill_random(mask, self.generator)
        return mask

    def random_b(self) -> torch.Tensor:
        """Draw b, with integers where zero points are subtracted, which is then exact."""
        if self.problem.zero_b is not None and self.problem.b.dtype in FLOAT8:
            most = number_range(self.problem)[1] - MOST_ZERO
            return self.placed(self.problem.b, self.integers(held_size(self.problem.b), -most, most, torch.float32))
        made = self.normal(self.problem.b, -2)
        return made if self._stated.sparsity is None else self.masked(made)

    def masked(self, b: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return b with zeros where the weight has no block, by default in a random pattern of the sparsity class."""
        sparsity, (k, n) = self._stated.blocks, self.problem.b.size
        mask = random_mask((n, k), sparsity, self.generator) if mask is None else mask
        return self.placed(self.problem.b, torch.where(spread(mask, sparsity).t(), b, torch.zeros_like(b)))

    def scaled_operands(self, a: torch.Tensor, b: torch.Tensor, scaling: Scaling) -> Operands:
        """Return operands whose sums over K equal the sums of ``a`` and ``b``, up to a factor for each row and column."""
        undo = scaling.undo(self.problem, self.device)
        if undo is not None:
            a = a * undo.to(a.dtype)
        if scaling.zero_b is not None:
            size, rows = self.problem.b_size, torch.arange(self.problem.k, device=self.device)
            cols = torch.arange(self.size_b[2], device=self.device)
            b = b + scale_at(scaling.zero_b, size, rows.unsqueeze(-1), cols).to(b.dtype)
        added = self.small_inp(MOST_ADDED)
        return self.operands(self.placed_a(a), self.placed_b(b), added=added, scaling=scaling)

    def undone(self, scaling: Scaling, factor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the number that an a of ``scaled_operands`` holds at ``index`` along K where the given one has ``factor``."""
        undo = scaling.undo(self.problem, self.device)
        return factor if undo is None else factor * undo.to(factor.dtype)[index]

    def gathered_scaling(self) -> Scaling:
        """Draw the scaling for picked numbers, with zero points as large as b's integers, and fractions if a's dtype holds them."""
        if self.problem.b.dtype in FLOAT8:
            return self.scaling(most_zero=MOST_ZERO)
        most = number_range(self.problem)[1]
        exact = 8 * (most + 1) <= dtype_info(self.problem.dtype).exact_integer
        return self.scaling(most_zero=most, zero_step=0.25 if exact else 1.0)

    def scaling(self, *, separable: bool = False, most_zero: int = 0, zero_step: float = 1.0) -> Scaling:
        """Draw exact scales, and zero points of both signs if b has zero points."""
        if self._unscaled:
            one = torch.ones(1, device=self.device)
            return Scaling(scale_a=one, scale_b=one)
        zeros = (0 if number_range(self.problem)[0] == 0 else -most_zero, most_zero)
        generator, device = self.generator, self.device
        return exact_scaling(self.problem, generator, device, separable=separable, zeros=zeros, zero_step=zero_step)

    def operands(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        added: torch.Tensor | None = None,
        scaling: Scaling | None = None,
        general: bool = False,
    ) -> Operands:
        """Assemble the operands. inp is NaN if beta is zero. ``general``: alpha, beta and scales of random, not exact, data."""
        problem = self.problem
        inp = added
        if problem.inp is not None and problem.beta == "zero":
            inp = self.placed(problem.inp, None)
        elif problem.inp is not None and inp is None:
            inp = self.normal(problem.inp)
        if scaling is None:
            random_scales = general and not self._unscaled
            scaling = random_scaling(problem, self.generator, self.device) if random_scales else self.scaling()
        alpha, beta = (GENERAL_ALPHA, GENERAL_BETA) if general else (ALPHA, BETA)
        made = Operands(
            a=a,
            b=b,
            inp=inp,
            extra=(),
            out=torch.empty(0, dtype=problem.out.dtype, device=self.device),
            alpha=scalar_value(problem.alpha, alpha),
            beta=scalar_value(problem.beta, beta),
            scale_a=scaling.scale_a,
            scale_b=scaling.scale_b,
            zero_b=scaling.zero_b,
            encoding=problem.encoding,
        )
        return parted(self._stated, made)


def _batched(size: tuple[int, ...]) -> tuple[int, int, int]:
    return (1, *size) if len(size) == 2 else size  # type: ignore[return-value]
