"""float32 numbers that are hard to split into parts, each by each of them."""

from __future__ import annotations

import math

import torch

from gemmtune.problem import Problem

MOST = torch.finfo(torch.float32).max
HARD = (
    math.inf, -math.inf, math.nan, MOST, -MOST, 0.0, -0.0, 2.0**-126, 2.0**-149, 2.0**-110, 1.0, -2.0, 0.5, 1 + 2.0**-23,
    16777215.0, -1.5 - 2.0**-9, 2.0**-60 * (1 + 2.0**-12), -3.3e38, 1.7e38,
)  # fmt: skip
"""Those beyond the range, at its ends, subnormal ones; with one part, two or three."""
LOST = 2.0**-110
"""Below it a number may lose parts, and what it is multiplied with decides how much that is."""


def hard_operands(problem: Problem, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b in the problem's layouts: column 5 of a and row 5 of b have the numbers, all others zeros."""
    hard = torch.tensor(HARD, device=device)
    operands = []
    for layout, at in ((problem.a, (slice(len(HARD)), 5)), (problem.b, (5, slice(len(HARD))))):
        x = torch.empty_strided(layout.size, layout.stride, device=device).zero_()
        x[at] = hard
        operands.append(x)
    return operands[0], operands[1]


def assert_as_in_torch(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """NaN where torch has it, the same infinities and the same bits, but for numbers so small that parts are lost."""
    a, b = a.cpu(), b.cpu()
    got, expected = out.cpu(), (a.double() @ b.double()).float()
    lost_a, lost_b = ((x != 0) & (x.abs() < LOST) for x in (a[: len(HARD), 5], b[5, : len(HARD)]))
    small = torch.zeros(got.shape, dtype=torch.bool)
    small[: len(HARD), : len(HARD)] = lost_a[:, None] | lost_b
    assert torch.equal(got.isnan()[~small], expected.isnan()[~small])
    apart = (got != expected) & ~small & ~expected.isnan()
    # Of the nine products of parts three are left out, and tensor cores cut off.
    near = (got.double() - expected.double()).abs() <= expected.double().abs() * 2.0**-21
    assert bool((~apart | near).all()), (got[apart & ~near], expected[apart & ~near])
