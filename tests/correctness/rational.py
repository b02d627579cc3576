"""Products in rational arithmetic: what is exactly right."""

from __future__ import annotations

from fractions import Fraction

import torch

Matrix = list[list[Fraction]]


def fractions(matrix: torch.Tensor) -> Matrix:
    """The elements of a 2-D tensor as they are."""
    return [[Fraction(x) for x in row] for row in matrix.double().tolist()]


def rational(a: torch.Tensor, b: torch.Tensor) -> Matrix:
    """a @ b."""
    left, right = fractions(a), fractions(b.T)
    return [[sum((x * y for x, y in zip(row, col, strict=True)), Fraction(0)) for col in right] for row in left]
