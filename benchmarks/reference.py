"""What a reference of a benchmark is."""

from __future__ import annotations

from dataclasses import dataclass

from gemmtune.choice import Choice, Kernel

__all__ = ["Reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A kernel to compare with. ``choice`` is torch's own, which tells how the operands have to lie: as they are."""

    choice: Choice
    kernel: Kernel
    tuning_s: float
