"""Scales and zero points of exact probes: powers of two and integers, different from block to block.

Sums whose terms have different scales cannot cancel, and a kernel may scale either the terms or sums of them. Where a probe's
sums have to cancel, the scales are **separable**. Each is a power for the place along K times one for the other dimension. A
factor of a undoes the power along K (``Scaling.undo``), so that every sum is the same as without scales.
"""

from dataclasses import dataclass

import torch

from ..problem import Layout, Problem
from .buffers import held_size, placed
from .operands import random_scale, random_zero, weight_unit
from .quantized import number_range, scale_at

ONLY = 2.0
"""Value of a scale that is the only one. It is not 1, so that the result shows if and how often it was applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """scale_a, scale_b and zero_b of one probe, if the problem has them."""

    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    zero_b: torch.Tensor | None = None

    def undo(self, problem: Problem, device: torch.device) -> torch.Tensor | None:
        """Return powers of two [K] that, times a, make separable scales constant along K; None if they already are."""
        inner, none = torch.arange(problem.k, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        factor: torch.Tensor | None = None
        for scale, size, along in (
            (self.scale_a, (problem.m, problem.k), (none, inner)),
            (self.scale_b, problem.b_size, (inner, none)),
        ):
            if scale is None:
                continue
            values = scale_at(scale, size, *along)
            if values.numel() > 1:
                values = values[0] / values
                factor = values if factor is None else factor * values
        return factor


def random_scaling(problem: Problem, generator: torch.Generator, device: torch.device) -> Scaling:
    """Draw scales of any value, and fractional zero points around the middle of b's numbers."""
    low, high = number_range(problem)
    zero: torch.Tensor | None = None
    if problem.zero_b is not None:
        middle, spread = (low + high) / 2, (high - low) / 8
        values = torch.empty(held_size(problem.zero_b), device=device)
        zero = placed(problem.zero_b, device, values.uniform_(middle - spread, middle + spread, generator=generator))
    return Scaling(
        scale_a=None if problem.scale_a is None else random_scale(problem.scale_a, generator, device),
        scale_b=None if problem.scale_b is None else random_scale(problem.scale_b, generator, device, unit=weight_unit(problem)),
        zero_b=zero,
    )


def exact_scaling(
    problem: Problem,
    generator: torch.Generator,
    device: torch.device,
    *,
    separable: bool = False,
    zeros: tuple[int, int] = (0, 0),
    zero_step: float = 1.0,
) -> Scaling:
    """Draw powers of two from 1 to 4 as scales, so that sums of integers stay integers.

    Zero points are multiples of ``zero_step`` in the range ``zeros``. ``separable`` scales are from 1/4 to 4.
    """

    def made(layout: Layout | None) -> torch.Tensor | None:
        return None if layout is None else placed(layout, device, _powers(layout, generator, device, separable=separable))

    return Scaling(
        scale_a=made(problem.scale_a),
        scale_b=made(problem.scale_b),
        zero_b=None if problem.zero_b is None else random_zero(problem.zero_b, generator, device, *zeros, step=zero_step),
    )


def _powers(layout: Layout, generator: torch.Generator, device: torch.device, *, separable: bool) -> torch.Tensor:
    """Draw powers of two to the capacity of the layout, where neighbours differ, or all equal if elements overlap."""
    size = held_size(layout)
    if len(size) < 2:
        return torch.full(size, ONLY, device=device)
    # Exponents −1, 0 and 1, each different from the previous one.
    rows, cols = (torch.randint(1, 3, (count,), generator=generator, device=device).cumsum(0) % 3 - 1 for count in size)
    if len(rows) * len(cols) == 1:
        return torch.full(size, ONLY, device=device)
    total = rows.unsqueeze(-1) + cols
    return torch.exp2((total if separable else total % 3).float())
