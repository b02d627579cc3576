"""Quantiles of Student's t law."""

from __future__ import annotations

import functools
import math

import numpy as np

__all__ = ["student_quantile"]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(128)
_STEPS = 60
"""Halvings of the interval of angles: more than a float64 tells apart."""


@functools.cache
def student_quantile(probability: float, freedom: float) -> float:
    """The t with P(T ≤ t) = ``probability``, at least 0.5, for ``freedom`` ≥ 1 degrees of freedom, whole or not.

    With t = √freedom · tan θ the density is cos^(freedom−1) θ up to a constant, and an angle is found by bisection.
    """
    if not 0.5 <= probability < 1 or not freedom >= 1:
        raise ValueError(f"student_quantile: got {probability} and {freedom}, expected 0.5 ≤ probability < 1 and freedom ≥ 1")
    half = math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)) * math.sqrt(math.pi) / 2
    tail = (1 - probability) * 2 * half
    low, high = 0.0, math.pi / 2
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _tail(middle, freedom - 1) > tail:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _tail(angle: float, power: float) -> float:
    """∫ cos^power from ``angle`` to π/2, by Gauss's rule."""
    width = (math.pi / 2 - angle) / 2
    points = np.cos(angle + width * (1 + _NODES))
    return float(width * np.sum(_WEIGHTS * np.maximum(points, 0) ** power))
