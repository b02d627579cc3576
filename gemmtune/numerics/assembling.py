"""Operands of one problem from values of a and b: scales, zero points and the added operand that go with them."""

from __future__ import annotations

import torch

from ..problem import Problem
from ..problem.dtypes import FLOAT8, dtype_info
from .buffers import held_size
from .drawing import Drawing
from .integers import MOST_ADDED, MOST_ZERO
from .joined import joined, parted
from .operands import ALPHA as GENERAL_ALPHA
from .operands import BETA as GENERAL_BETA
from .operands import Operands, scalar_value
from .quantized import number_range, scale_at
from .scaling import Scaling, exact_scaling, random_scaling

__all__ = ["ALPHA", "BETA", "Assembling"]

ALPHA, BETA = 2.0, -3.0
"""Of class ``general`` in exact probes: a power of two, which scales exactly, and a small integer."""


class Assembling(Drawing):
    """Puts operands together. A sum of two products is drawn as one (``joined``), and its operands are parted at the end."""

    def __init__(self, problem: Problem, device: torch.device, *, seed: int) -> None:
        super().__init__(joined(problem), device, seed=seed)
        self._stated = problem

    def random_b(self) -> torch.Tensor:
        """Integers where zero points are subtracted, which is exact then."""
        if self.problem.zero_b is not None and self.problem.b.dtype in FLOAT8:
            most = number_range(self.problem)[1] - MOST_ZERO
            return self.placed(self.problem.b, self.integers(held_size(self.problem.b), -most, most, torch.float32))
        return self.normal(self.problem.b, -2)

    def scaled_operands(self, a: torch.Tensor, b: torch.Tensor, scaling: Scaling) -> Operands:
        """Operands whose sums over K are those of the values ``a`` and ``b``, up to a factor for each row and each column."""
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
        """What an a of ``scaled_operands`` holds at these places along K where the given one has ``factor``."""
        undo = scaling.undo(self.problem, self.device)
        return factor if undo is None else factor * undo.to(factor.dtype)[index]

    def picked_scaling(self) -> Scaling:
        """Scaling of picked numbers: zero points as large as b's integers, with a fraction where a's dtype holds differences."""
        if self.problem.b.dtype in FLOAT8:
            return self.scaling(most_zero=MOST_ZERO)
        most = number_range(self.problem)[1]
        exact = 8 * (most + 1) <= dtype_info(self.problem.dtype).exact_integer
        return self.scaling(most_zero=most, zero_step=0.25 if exact else 1.0)

    def scaling(self, *, separable: bool = False, most_zero: int = 0, zero_step: float = 1.0) -> Scaling:
        """Exact scales, and zero points of both signs if b has them."""
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
        """inp is NaN throughout where beta is zero, since it must not be read; alpha and beta are those of random or exact data."""
        problem = self.problem
        inp = added
        if problem.inp is not None and problem.beta == "zero":
            inp = self.placed(problem.inp, None)
        elif problem.inp is not None and inp is None:
            inp = self.normal(problem.inp)
        if scaling is None:
            scaling = random_scaling(problem, self.generator, self.device) if general else self.scaling()
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
