"""Expected result of one call in full, as failures report it."""

from __future__ import annotations

from dataclasses import dataclass

from ...numerics.operands import Operands
from ...numerics.propagate import Approximate


@dataclass(frozen=True, kw_only=True)
class Expected:
    """All elements of the right result, float64 (B, M, N), and the operands that they came from."""

    name: str
    operands: Operands
    right: Approximate
    known: bool = True
    """False if ``right`` may itself be wrong. Then no bug is named as the explanation."""


class NoResult(Exception):
    """The call returned nothing that can be judged further. The failure has been recorded."""
